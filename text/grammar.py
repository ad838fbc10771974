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
from typing import Protocol

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
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+.\w]+)')
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
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
            _check_multiples(self)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(self.form())
        if is_error:
            raise GrammarError(self.kind.value, told(messages[0]))


def _lark_text(text: str) -> str:
    """A text as Lark writes it: as JSON, but that it has no delete character as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check_multiples(grammar: Grammar) -> None:
    """Raise GrammarError if numbers have to be multiples of something large.

    The automaton for it has a state for each remainder, of all such conditions on one number together, and what
    it takes to compile grows with their square: minutes for some millions, which nothing of llguidance's own bounds.
    Zeros at the end cost nothing.
    """
    plain = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), grammar.source)
    together = 1
    for number in set(_MULTIPLE.findall(plain)):
        try:
            digits = Decimal(number).normalize().as_tuple().digits
        except ArithmeticError as error:
            raise GrammarError(grammar.kind.value, f"multipleOf is no number: {told(number)}") from error
        together = math.lcm(together, int("".join(map(str, digits[:20]))) or 1)
        if together > MOST_REMAINDERS:
            raise GrammarError(
                grammar.kind.value,
                f"multipleOf: {told(number)} is too large, alone or with the others: their least common multiple, "
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
