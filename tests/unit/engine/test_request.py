from __future__ import annotations

import math
from typing import Any

import pytest
from headrace.contract import Reason

from engine.request import RequestRefused, SamplingParams


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
    ],
)
def test_a_value_without_a_meaning_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestRefused, match=name) as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name
    assert refused.value.code == Reason.INVALID_REQUEST


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": -1}, {"top_k": 0}, {"top_k": 10**9}, {"top_p": 0}, {"top_p": 1}, {"min_p": 0}, {"min_p": 1},
        {"max_tokens": 0}, {"temperature": 1e-9}, {"seed": 2**63 - 1}, {"min_tokens": 16},
    ],
)  # fmt: skip
def test_the_ends_of_every_range_are_allowed(params: dict[str, Any]) -> None:
    SamplingParams(**params)


@pytest.mark.parametrize("stop", ["ab", ["ab"], ("ab",)])
def test_a_stop_may_be_one_string_or_any_sequence(stop: Any) -> None:
    assert SamplingParams(stop=stop).stop == ("ab",)


def test_parameters_are_hashable_whatever_they_were_made_of() -> None:
    ids: Any = [1, 2]
    assert hash(SamplingParams(stop_token_ids=ids)) == hash(SamplingParams(stop_token_ids=(1, 2)))
