"""Penalties, bias, bans and grammars: logits that are changed before anything is drawn."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.protocol import Kernels
from kernels.sampling import Adjustment
from tests.unit.kernels.sampling.rows import VOCAB, batch, drawn, logits


class TestAdjustments:
    """Each by its definition, on a greedy row and on a sampled one."""

    def adjusted(self, kernels: Kernels, row: Tensor, adjustment: Adjustment, **parameters: Any) -> list[int]:
        rows = row.repeat(200, 1)
        return drawn(kernels, rows, adjust=(adjustment,) * 200, **parameters)

    def test_repetition_counts_prompt_and_output_once(self, kernels: Kernels) -> None:
        """https://github.com/vllm-project/vllm-metal/issues/69"""
        row = torch.full((VOCAB,), -9.0)
        row[[3, 4, 5, 6]] = torch.tensor([8.0, 7.0, 6.5, 3.0])
        penalty = Adjustment(tokens=[3, 3, 3, 4], prompt_tokens=3, repetition=1.25)
        assert set(self.adjusted(kernels, row, penalty, temperature=0.0)) == {5}
        assert set(self.adjusted(kernels, row, Adjustment(tokens=[4], prompt_tokens=1, repetition=2.0), top_k=1)) == {3}

    def test_repetition_makes_negative_logits_smaller(self, kernels: Kernels) -> None:
        row = torch.full((VOCAB,), -100.0)
        row[[3, 4]] = torch.tensor([-1.0, -1.5])
        penalty = Adjustment(tokens=[3], prompt_tokens=1, repetition=2.0)
        assert set(self.adjusted(kernels, row, penalty, temperature=0.0)) == {4}

    def test_presence_and_frequency_count_the_output_alone(self, kernels: Kernels) -> None:
        """https://github.com/vllm-project/vllm-metal/issues/69"""
        row = torch.full((VOCAB,), -100.0)
        row[[3, 4, 5]] = torch.tensor([5.0, 4.5, 4.0])
        tokens = [3, 3, 3, 4, 4, 5]
        for name in ("presence", "frequency"):
            prompt_only = Adjustment(tokens=tokens, prompt_tokens=6, **{name: 2.0})
            assert set(self.adjusted(kernels, row, prompt_only, temperature=0.0)) == {3}
        once = Adjustment(tokens=tokens, prompt_tokens=3, presence=0.75)
        assert set(self.adjusted(kernels, row, once, temperature=0.0)) == {3}
        each = Adjustment(tokens=[9, 3, 3, 4], prompt_tokens=1, frequency=0.4)
        assert set(self.adjusted(kernels, row, each, temperature=0.0)) == {3}
        each = Adjustment(tokens=[9, 3, 3, 4], prompt_tokens=1, frequency=0.6)
        assert set(self.adjusted(kernels, row, each, temperature=0.0)) == {5}
        any_time = Adjustment(tokens=[9, 3, 3, 4, 4], prompt_tokens=1, presence=1.2)
        assert set(self.adjusted(kernels, row, any_time, temperature=0.0)) == {5}

    def test_bias_is_added_after_the_penalties(self, kernels: Kernels) -> None:
        row = torch.zeros(VOCAB)
        row[7] = 4.0
        penalty = Adjustment(tokens=[7], prompt_tokens=1, repetition=2.0, bias=((9, 3.0), (8, 2.5)))
        assert set(self.adjusted(kernels, row, penalty, temperature=0.0)) == {9}
        assert set(self.adjusted(kernels, row, Adjustment(bias=((9, 3.0), (7, -4.0))), temperature=0.0)) == {9}

    @pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
    def test_only_allowed_tokens_are_chosen(self, kernels: Kernels, temperature: float) -> None:
        for allowed in ({0}, {VOCAB - 1}, {5, 8, 64, 999}, set(range(0, VOCAB, 3))):
            packed = sum(1 << i for i in allowed).to_bytes(-(-VOCAB // 8), "little")
            got = set(self.adjusted(kernels, logits(1)[0], Adjustment(allowed=packed), temperature=temperature))
            assert got <= allowed
            assert temperature < 50 or len(got) > len(allowed) / 3

    def test_a_ban_holds_whatever_the_bias(self, kernels: Kernels) -> None:
        row = torch.zeros(VOCAB)
        packed = ((1 << 3) | (1 << 4)).to_bytes(-(-VOCAB // 8), "little")
        adjustment = Adjustment(bias=((3, 100.0),), allowed=packed)
        assert set(self.adjusted(kernels, row, adjustment, banned=(3,), temperature=1.0)) == {4}

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_mixture_is_its_definition(self, kernels: Kernels, data: st.DataObject) -> None:
        ids = st.integers(0, VOCAB - 1)
        tokens = data.draw(st.lists(st.integers(0, 20), max_size=30))
        adjustment = Adjustment(
            tokens=tokens,
            prompt_tokens=data.draw(st.integers(0, len(tokens))),
            repetition=data.draw(st.floats(0.5, 2.0)),
            frequency=data.draw(st.floats(-2.0, 2.0)),
            presence=data.draw(st.floats(-2.0, 2.0)),
            bias=tuple(data.draw(st.dictionaries(ids, st.floats(-5.0, 5.0), max_size=4)).items()),
        )
        row = logits(1, seed=data.draw(st.integers(0, 99)))
        row[0, :21] += 3
        wanted = by_definition(row[0].tolist(), adjustment)
        got = kernels.sample(row.clone(), batch(1, temperature=0.0, adjust=(adjustment,))).tokens[0]
        assert wanted[got] >= max(wanted) - 1e-4


def by_definition(row: list[float], adjustment: Adjustment) -> list[float]:
    """The adjusted logits in plain Python."""
    row = list(row)
    for token in set(adjustment.tokens):
        row[token] = row[token] / adjustment.repetition if row[token] > 0 else row[token] * adjustment.repetition
    for token, times in Counter(adjustment.tokens[adjustment.prompt_tokens :]).items():
        row[token] -= adjustment.frequency * times + adjustment.presence
    for token, addition in adjustment.bias:
        row[token] += addition
    return row
