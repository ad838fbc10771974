from __future__ import annotations

import math
from typing import Any

import pytest
from headrace.contract import Reason
from hypothesis import given
from hypothesis import strategies as st

from engine.params import RequestRefused, SamplingParams

WHOLE = ("max_tokens", "min_tokens", "top_k", "n", "seed", "logprobs", "prompt_logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "guided_choice")
FLAGS = ("ignore_eos", "include_stop_str_in_output")
MAPPINGS = ("logit_bias", "response_format")
TEXTS = ("guided_regex", "guided_grammar")
NAMES = (*WHOLE, *NUMBERS, *LISTS, *FLAGS, *MAPPINGS, *TEXTS)


def refused(**params: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        SamplingParams(**params)
    assert caught.value.code == Reason.INVALID_REQUEST
    return caught.value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ("a", "")),
        ("stop", ""),
        ("stop", ("\ud800",)),
        ("bad_words", ("a\udfff",)),
        ("guided_regex", "\ud800"),
        ("guided_choice", ("\ud800",)),
        ("stop_token_ids", (-1,)),
        ("n", 0),
        ("n", 17),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: math.nan}),
        ("bad_words", (" ",)),
        ("bad_words", ("",)),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (-1,)),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("response_format", {}),
        ("response_format", {"type": "yaml"}),
        ("guided_regex", ""),
        ("guided_grammar", ""),
        ("guided_choice", ()),
        ("guided_choice", ("a", "")),
        ("temperature", 10**400),
        ("logit_bias", {1: 10**400}),
        ("stop", ["a" * 10**6, ""]),
        ("bad_words", [""] * 10**5),
    ],
)
def test_a_value_without_a_meaning_is_refused_by_name(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.param == name
    assert name in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [2.5, 2.0, "2", True, [], math.nan])
def test_a_whole_number_is_nothing_else(name: str, value: Any) -> None:
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["1", True, None, [], 1j])
def test_a_number_is_nothing_else(name: str, value: Any) -> None:
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "yes", None])
def test_a_flag_is_nothing_else(name: str, value: Any) -> None:
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("value", [7, {"a": 1}, {1, 2}, b"ab", [None], [["a"]], [1.5], [True]])
def test_a_list_is_nothing_else(name: str, value: Any) -> None:
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize(("name", "value"), [("stop", [1]), ("bad_words", [1]), ("stop_token_ids", ["1"])])
def test_what_a_list_holds_is_of_one_kind(name: str, value: Any) -> None:
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.parametrize("value", [7, "x", [(1, 2)], {"a": "b"}])
def test_a_mapping_is_nothing_else(name: str, value: Any) -> None:
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("value", [7, b"a", ["a"]])
def test_a_text_is_nothing_else(name: str, value: Any) -> None:
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": -1}, {"top_k": 0}, {"top_k": 10**9}, {"top_p": 0}, {"top_p": 1}, {"min_p": 0}, {"min_p": 1},
        {"max_tokens": 0}, {"temperature": 1e-9}, {"seed": 2**63 - 1}, {"min_tokens": 16}, {"n": 16},
        {"repetition_penalty": 0.01}, {"presence_penalty": -2}, {"frequency_penalty": 2}, {"logit_bias": {}},
        {"logit_bias": {0: -100, 5: 100.0}}, {"logprobs": 0}, {"logprobs": 20}, {"max_tokens": 0, "prompt_logprobs": 0},
        {"response_format": {"type": "text"}, "guided_regex": "a"},
    ],
)  # fmt: skip
def test_the_ends_of_every_range_are_allowed(params: dict[str, Any]) -> None:
    SamplingParams(**params)


def test_a_number_of_more_digits_than_python_writes_is_refused_by_name() -> None:
    for params in ({"n": 10**5000}, {"max_tokens": -(10**5000)}, {"top_p": 10**5000}, {"bad_words": [10**5000]}):
        error = refused(**params)
        assert [error.param] == [*params]
        assert "of too many digits" in str(error)
    assert refused(max_tokens=10**5000, min_tokens=-1).param == "min_tokens"


def test_a_text_follows_one_grammar() -> None:
    assert "follows one grammar" in str(refused(guided_regex="a", guided_choice=["b"]))


@pytest.mark.parametrize("stop", ["ab", ["ab"], ("ab",)])
def test_a_stop_may_be_one_string_or_any_sequence(stop: Any) -> None:
    assert SamplingParams(stop=stop).stop == ("ab",)


def test_parameters_are_hashable_whatever_they_were_made_of() -> None:
    ids: Any = [1, 2]
    params = SamplingParams(stop_token_ids=ids, logit_bias={1: 2.0}, response_format={"type": "json_object"})
    same = SamplingParams(stop_token_ids=(1, 2), logit_bias={1: 2.0}, response_format={"type": "json_object"})
    assert (params, hash(params)) == (same, hash(same))


def test_parameters_keep_what_they_were_given() -> None:
    bias, schema = {1: 2.0}, {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    params = SamplingParams(logit_bias=bias, response_format=schema)
    bias[2] = 3.0
    schema["json_schema"]["schema"]["type"] = "array"  # type: ignore[index]
    assert params.logit_bias == {1: 2.0}
    assert params.response_format == {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(params=st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=4))
def test_anything_at_all_is_taken_or_refused_by_name(params: dict[str, Any]) -> None:
    """Never another exception, whatever a caller hands in."""
    try:
        hash(SamplingParams(**params))
    except RequestRefused as error:
        told = (error.param, str(error))
    else:
        told = (None, "")
    assert told[0] is None or (told[0] in NAMES and told[0] in told[1])
