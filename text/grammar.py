"""Grammars that a text has to follow: what may be asked for, and whether it can be understood. No model is needed.

`engine.grammar` masks tokens by them. What each kind means is llguidance's to say:
https://github.com/guidance-ai/llguidance/blob/main/docs
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any, Protocol

from llguidance import LLMatcher

_MOST_TOLD = 300
_WHITESPACE = r"(\n[ ]{0,24}|[ ])?"
"""Between JSON's tokens: enough to indent by, never an endless run, which small models fall into."""


class GrammarError(ValueError):
    """The grammar can't be understood, or is too large; `param` is the field that asked for it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class Kind(StrEnum):
    """What a grammar is written in; the values are the fields that ask for it."""

    JSON = "response_format"
    REGEX = "guided_regex"
    CHOICE = "guided_choice"
    LARK = "guided_grammar"


MOST_CHARS = {Kind.JSON: 65_536, Kind.CHOICE: 65_536, Kind.LARK: 16_384, Kind.REGEX: 8_192}
"""Of a grammar as it is written: compiling an expression takes time that grows with the square of its length.

What it may grow to while it is compiled is bounded by llguidance's own limits.
"""
MOST_REMAINDERS = 20_000
"""Least common multiple of all `multipleOf`: about a tenth of a second to compile."""
MOST_PATTERNS = 50
"""Of `patternProperties` in one object: as long to compile."""
_EMBEDDED = re.compile(r"%json\s*")
"""What stands before a JSON schema in a Lark grammar."""
_LONG_STRING = re.compile(rf'"(?:[^"\\]|\\.){{{MOST_CHARS[Kind.REGEX] + 1}}}')


class AsksForGrammar(Protocol):
    """The fields of a request that ask for a grammar; at most one of them is given."""

    @property
    def response_format(self) -> Mapping[str, object] | None: ...
    @property
    def guided_regex(self) -> str | None: ...
    @property
    def guided_choice(self) -> Sequence[str] | None: ...
    @property
    def guided_grammar(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar in one of its forms: a JSON schema, a regular expression, a JSON list of texts, or Lark."""

    kind: Kind
    source: str

    def form(self) -> str:
        """What llguidance compiles. Raises GrammarError for what can't be written as such."""
        try:
            match self.kind:
                case Kind.JSON:
                    return LLMatcher.grammar_from_json_schema(
                        self.source, overrides={"whitespace_pattern": _WHITESPACE}
                    )
                case Kind.REGEX:
                    return LLMatcher.grammar_from_regex(self.source)
                case Kind.CHOICE:
                    texts = [_lark_text(text) for text in json.loads(self.source)]
                    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(texts)}")
                case Kind.LARK:
                    return LLMatcher.grammar_from_lark(self.source)
        except (ValueError, TypeError) as error:  # not Unicode, or no schema
            raise GrammarError(self.kind.value, told(str(error))) from error

    def check(self) -> None:
        """Raise GrammarError unless it can be compiled, as far as that is known without a tokenizer."""
        chars, most = len(self.source), MOST_CHARS[self.kind]
        if chars > most:
            raise GrammarError(self.kind.value, f"the grammar has {chars} characters, and may have {most}")
        if self.kind is Kind.JSON and _LONG_STRING.search(self.source):
            raise GrammarError(
                self.kind.value, f"a text in the schema has more than {MOST_CHARS[Kind.REGEX]} characters"
            )
        if self.kind in (Kind.JSON, Kind.LARK):
            _check_schemas(self)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(self.form())
        if is_error:
            raise GrammarError(self.kind.value, told(messages[0]))


def _lark_text(text: str) -> str:
    """A text as Lark writes it: as JSON, but that it has no delete character as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check_schemas(grammar: Grammar) -> None:
    """Raise GrammarError for what takes minutes to compile and nothing of llguidance's own bounds.

    A number that has to be a multiple has an automaton with a state for each remainder, of all such conditions on it
    together; zeros at the end cost nothing. Patterns of properties are compared with one another.
    """
    multiples: list[Decimal] = []
    patterns: list[int] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        multiples.extend(value for name, value in pairs if name == "multipleOf" and isinstance(value, Decimal))
        patterns.extend(len(value) for name, value in pairs if name == "patternProperties" and isinstance(value, dict))
        return dict(pairs)

    decoder = json.JSONDecoder(object_pairs_hook=note, parse_int=Decimal, parse_float=Decimal)
    starts = [0] if grammar.kind is Kind.JSON else [found.end() for found in _EMBEDDED.finditer(grammar.source)]
    for start in starts:
        try:
            decoder.raw_decode(grammar.source, start)
        except ValueError:  # not JSON: whoever compiles it says so
            continue
        except (RecursionError, ArithmeticError) as error:
            raise GrammarError(grammar.kind.value, f"the schema can't be read: {told(str(error))}") from error
    if any(count > MOST_PATTERNS for count in patterns):
        raise GrammarError(
            grammar.kind.value, f"{max(patterns)} patterns of properties are given, and {MOST_PATTERNS} may be"
        )
    together = 1
    for number in multiples:
        digits = number.normalize().as_tuple().digits
        together = math.lcm(together, int("".join(map(str, digits[:20]))) or 1)
        if together > MOST_REMAINDERS:
            raise GrammarError(
                grammar.kind.value,
                f"multipleOf {told(str(number))} is too large, alone or with the others: their least common multiple, "
                f"without zeros at its end, may be {MOST_REMAINDERS}",
            )


def grammar_of(asked: AsksForGrammar) -> Grammar | None:
    """The grammar that a request asks for, if it does. Raises GrammarError if it asks for two, or for none we know."""
    found = []
    if asked.response_format is not None:
        found.append(_of_response_format(asked.response_format))
    if asked.guided_regex is not None:
        found.append(Grammar(Kind.REGEX, asked.guided_regex))
    if asked.guided_choice is not None:
        found.append(Grammar(Kind.CHOICE, json.dumps(list(asked.guided_choice))))
    if asked.guided_grammar is not None:
        found.append(Grammar(Kind.LARK, asked.guided_grammar))
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        names = " and ".join(grammar.kind.value for grammar in grammars)
        raise GrammarError(grammars[1].kind.value, f"a text follows one grammar, and {names} are given")
    return grammars[0] if grammars else None


def _of_response_format(asked: Mapping[str, object]) -> Grammar | None:
    match asked:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Grammar(Kind.JSON, '{"type":"object"}')
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            try:
                return Grammar(Kind.JSON, json.dumps(schema, ensure_ascii=False, separators=(",", ":")))
            except (TypeError, ValueError, RecursionError) as error:
                raise GrammarError(Kind.JSON.value, f"the schema is not JSON: {told(str(error))}") from error
    raise GrammarError(
        Kind.JSON.value,
        "the type is one of 'text', 'json_object' and 'json_schema', the last with json_schema.schema, an object",
    )


def told(message: str) -> str:
    """A compiler's message on one line, cut to what a person reads."""
    line = " ".join(message.split())
    return line if len(line) <= _MOST_TOLD else line[:_MOST_TOLD] + "…"
