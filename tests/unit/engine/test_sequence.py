from __future__ import annotations

from typing import Any

import pytest

from engine.request import SamplingParams
from engine.sequence import RowSampling, TokenSequence


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "top_k": 40},
        {"temperature": 1e-6},
        {"top_k": 1},
        {"top_p": 0.0, "min_p": 0.5},
        {"top_k": 1, "min_p": 1},
    ],
)
def test_every_greedy_form_is_the_same(params: dict[str, Any]) -> None:
    """https://github.com/vllm-project/vllm/issues/5404, https://github.com/vllm-project/vllm/issues/1623"""
    assert RowSampling.of(SamplingParams(seed=3, **params)) == (0.0, 0, 1.0, 0.0, 3)


def test_other_parameters_are_kept() -> None:
    params = SamplingParams(temperature=1e-4, top_k=7, top_p=0.5, min_p=0.1, seed=9)
    assert RowSampling.of(params) == (1e-4, 7, 0.5, 0.1, 9)


def test_no_limit_on_k_has_one_form() -> None:
    assert RowSampling.of(SamplingParams(top_k=-1)).top_k == RowSampling.of(SamplingParams(top_k=0)).top_k == 0


def test_a_seed_is_drawn_if_none_is_given() -> None:
    first, second = (RowSampling.of(SamplingParams()).seed for _ in range(2))
    assert first != second
    assert all(0 <= seed < 2**63 for seed in (first, second))


def test_ends_are_banned_until_they_may_come() -> None:
    sequence = TokenSequence("a", [1, 2], prompt_tokens=2, max_len=9, end_ids=(5,), ends_from=3)
    assert sequence.banned == (5,)
    sequence.tokens.append(7)
    assert sequence.banned == ()


def test_the_last_token_needs_no_kv() -> None:
    assert TokenSequence("a", [1, 2], prompt_tokens=2, max_len=9).kv_tokens == 8
    assert TokenSequence("a", [1, 2], prompt_tokens=2, max_len=2).kv_tokens == 2
