"""Rows that nothing can be chosen by say so, however they are chosen, and their neighbours don't notice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.columns import Columns
from kernels.protocol import Kernels
from kernels.sampling import NO_TOKEN, Adjustment
from tests.unit.kernels.sampling.rows import VOCAB, batch, logits

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in Triton's interpreter

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "open": {},
    "top_k": {"top_k": 5},
    "long top_k": {"top_k": 700},
    "top_p": {"top_p": 0.9, "temperature": 20.0},
    "min_p": {"min_p": 0.01},
}
BROKEN = (math.nan, -math.inf, math.inf)


def rows() -> Tensor:
    """A row of numbers between any two that are none."""
    table = logits(2 * len(BROKEN) + 1)
    table[1::2] = torch.tensor(BROKEN)[:, None]
    return table


def assert_told(got: list[int], sound: list[int]) -> None:
    assert got[1::2] == [NO_TOKEN] * len(BROKEN)
    assert got[::2] == sound[::2]
    assert NO_TOKEN not in sound


@pytest.mark.parametrize("way", WAYS)
def test_they_have_no_token(kernels: Kernels, way: str) -> None:
    """https://github.com/vllm-project/vllm/issues/1623"""
    table = rows()
    asked = batch(len(table), **WAYS[way])
    sound = kernels.sample(logits(len(table)), asked).tokens
    assert_told(kernels.sample(table.clone(), asked).tokens, sound)
    assert_told(kernels.choose(table.clone(), Columns.on(table.device, asked, VOCAB)).tolist(), sound)


@pytest.mark.parametrize("way", WAYS)
def test_nor_with_rules_and_reports(kernels: Kernels, way: str) -> None:
    table = rows()
    count = len(table)
    adjustment = Adjustment(tokens=(3, 4, 4), prompt_tokens=1, repetition=1.3, frequency=0.5, bias=((7, 2.0),))
    asked = batch(count, **WAYS[way], adjust=(adjustment,) * count, logprobs=(2,) * count)
    sound = kernels.sample(logits(count), asked)
    got = kernels.sample(table.clone(), asked)
    assert_told(got.tokens, sound.tokens)
    assert got.logprobs is not None
    assert got.logprobs[::2] == (sound.logprobs or [])[::2]
    for told in got.logprobs[1::2]:
        assert told is not None
        assert (told.token, told.rank, told.top) == (NO_TOKEN, 0, ())
        assert math.isnan(told.logprob)


def test_a_token_that_is_given_is_kept_and_its_logprob_says_it(kernels: Kernels) -> None:
    got = kernels.sample(torch.full((1, VOCAB), math.nan), batch(1, forced=(7,), logprobs=(0,)))
    assert got.tokens == [7]
    assert got.logprobs is not None
    assert got.logprobs[0] is not None
    assert math.isnan(got.logprobs[0].logprob)


@pytest.mark.parametrize("way", WAYS)
def test_a_few_of_many_are_never_chosen(kernels: Kernels, way: str) -> None:
    """Whether the others are chosen from or not is each implementation's own affair."""
    table = logits(20)
    table[:, ::3] = math.nan
    for token in kernels.sample(table.clone(), batch(20, **WAYS[way])).tokens:
        assert token == NO_TOKEN or token % 3
