from __future__ import annotations

import io

import pytest

from cli.output import Exit, Failure
from cli.params import named_params, named_paths, schema_format


def test_values_are_json_or_text() -> None:
    given = ["n=3", 'stop=["a"]', "guided_regex=[0-9]+=x", 'logit_bias={"5": -1.5}', "ignore_eos=true", "tenant=shop"]
    assert named_params(given) == {
        "n": 3, "stop": ["a"], "guided_regex": "[0-9]+=x", "logit_bias": {"5": -1.5}, "ignore_eos": True,
        "tenant": "shop",
    }  # fmt: skip


@pytest.mark.parametrize("given", [["n"], ["=3"], ["n=1", "n=2"]])
def test_what_is_no_parameter_is_wrong_usage(given: list[str]) -> None:
    with pytest.raises(Failure) as caught:
        named_params(given)
    assert caught.value.code is Exit.USAGE


def test_adapters_have_names_and_paths() -> None:
    assert named_paths(["sql=/models/sql", "law=relative/a=b"]) == {"sql": "/models/sql", "law": "relative/a=b"}


@pytest.mark.parametrize("given", [["sql"], ["=x"], ["sql="], ["a=x", "a=y"]])
def test_what_names_no_adapter_is_wrong_usage(given: list[str]) -> None:
    with pytest.raises(Failure, match="--adapter") as caught:
        named_paths(given)
    assert caught.value.code is Exit.USAGE


def test_a_schema_becomes_a_response_format() -> None:
    assert schema_format(io.StringIO('{"type": "object"}')) == {
        "type": "json_schema", "json_schema": {"schema": {"type": "object"}}
    }  # fmt: skip


def test_a_schema_file_without_json_is_named() -> None:
    file = io.StringIO("no")
    file.name = "answer.json"
    with pytest.raises(Failure, match=r"answer\.json holds no JSON"):
        schema_format(file)
