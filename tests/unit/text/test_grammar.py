"""Grammars as they are asked for: what is understood, what is refused, and how fast."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

import pytest

from text.grammar import Grammar, GrammarError, Kind, grammar_of


@dataclass
class Asked:
    response_format: Any = None
    guided_regex: str | None = None
    guided_choice: Any = None
    guided_grammar: str | None = None


def json_schema(schema: Any) -> Asked:
    return Asked({"type": "json_schema", "json_schema": {"name": "any", "schema": schema}})


def check(asked: Asked) -> None:
    grammar = grammar_of(asked)
    assert grammar is not None
    grammar.check()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("asked", "kind", "source"),
    [
        (Asked({"type": "json_object"}), Kind.JSON, '{"type":"object"}'),
        (json_schema({"const": None}), Kind.JSON, '{"const":null}'),
        (Asked(guided_regex="a+"), Kind.REGEX, "a+"),
        (Asked(guided_choice=("a", "b")), Kind.CHOICE, '["a", "b"]'),
        (Asked(guided_grammar='start: "a"'), Kind.LARK, 'start: "a"'),
    ],
)
def test_each_form_is_understood(asked: Asked, kind: Kind, source: str) -> None:
    grammar = grammar_of(asked)
    assert grammar == Grammar(kind, source)
    grammar.check()


@pytest.mark.parametrize("asked", [Asked(), Asked({"type": "text"})])
def test_a_request_may_ask_for_none(asked: Asked) -> None:
    assert grammar_of(asked) is None


@pytest.mark.parametrize(
    ("asked", "param", "says"),
    [
        (Asked({"type": "yaml"}), "response_format", "'json_object'"),
        (Asked({"type": "json_schema"}), "response_format", "json_schema.schema"),
        (Asked({"type": "json_schema", "json_schema": {"schema": "x"}}), "response_format", "an object"),
        (json_schema({"const": object()}), "response_format", "not JSON"),
        (Asked({"type": "json_object"}, guided_regex="a"), "guided_regex", "response_format and guided_regex"),
        (Asked(guided_regex="("), "guided_regex", "unclosed group"),
        (Asked(guided_regex="(?=a)b"), "guided_regex", "look-around"),
        (Asked(guided_regex="\ud800"), "guided_regex", "surrogates"),
        (Asked(guided_regex="a" * 8193), "guided_regex", "8193 characters, and may have 8192"),
        (Asked(guided_grammar="start: " + "a" * 16_384), "guided_grammar", "16391 characters, and may have 16384"),
        (json_schema({"enum": ["x" * 65_536]}), "response_format", "65549 characters, and may have 65536"),
        (json_schema({"pattern": "[a-z]*" * 1500}), "response_format", "more than 8192 characters"),
        (json_schema({"pattern": '"' * 8193}), "response_format", "more than 8192 characters"),
        (Asked(guided_grammar="start: nope"), "guided_grammar", 'unknown name: "nope"'),
        (Asked(guided_grammar="%%%"), "guided_grammar", "error"),
        (Asked(guided_grammar="start: " + "(" * 8000 + '"a"' + ")" * 8000), "guided_grammar", "nested"),
        (Asked(guided_choice=["\ud800"]), "guided_choice", "surrogates"),
        (json_schema({"type": "strin"}), "response_format", "strin"),
        (json_schema({"not": {"type": "string"}}), "response_format", "not"),
        (json_schema({"$ref": "https://schemas.invalid/x.json"}), "response_format", "not present"),
        (json_schema({"type": "string", "pattern": "("}), "response_format", "unclosed group"),
        (json_schema(nested(500)), "response_format", "recursion limit"),
        (json_schema({"type": "integer", "multipleOf": 3_000_017}), "response_format", "3000017 is too large"),
        (json_schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 0.0991}]}), "response_format", "too large"),
        (json_schema({"multipleOf": 20_011e300}), "response_format", "too large"),
        (Asked(guided_grammar='start: %json {"multiple\\u004ff": 20011}'), "guided_grammar", "20011 is too large"),
        (json_schema({"multipleOf": 10**6000 + 1}), "response_format", "exponent|too large|digits"),
        (json_schema({"patternProperties": {f"^k{i}_": {} for i in range(51)}}), "response_format", "51 patterns"),
        (Asked(guided_grammar="start: %json " + '{"items":' * 1100 + "{}" + "}" * 1100), "guided_grammar", "."),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(asked: Asked, param: str, says: str) -> None:
    with pytest.raises(GrammarError, match=says) as refused:
        check(asked)
    assert refused.value.param == param
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


def test_multiples_of_what_people_count_in_are_understood() -> None:
    sizes = [0.01, 0.25, 5, 12, 60, 3600, 1_000_000]
    check(json_schema({"properties": {f"in{size}": {"type": "number", "multipleOf": size} for size in sizes}}))


@pytest.mark.parametrize(
    "asked",
    [
        Asked(guided_regex="(.{1,1000}){1,1000}"),
        Asked(guided_regex="(a|b|ab)*" * 900),
        Asked(guided_regex="\\w{1,60000}"),
        Asked(guided_grammar="start: start start | " + " | ".join(json.dumps(f"w{i}") for i in range(1500))),
        json_schema({"enum": [f"value {i}" for i in range(3000)]}),
        json_schema({"type": "array", "minItems": 10**6, "items": {"type": "string", "minLength": 10**6}}),
        json_schema({"allOf": [{"anyOf": [{"minLength": 10 * i + j} for j in range(10)]} for i in range(10)]}),
        json_schema({"$ref": "#"}),
    ],
)
@pytest.mark.timeout(30)
def test_a_hostile_grammar_is_decided_on(asked: Asked) -> None:
    """Whether it is taken or refused, the HTTP door goes on."""
    with contextlib.suppress(GrammarError):
        check(asked)
