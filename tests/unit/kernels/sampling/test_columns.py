"""Rows that a device chooses by itself: the same tokens as by the host's parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.columns import Columns, chosen_by_columns
from kernels.protocol import Kernels
from kernels.sampling import Adjustment
from tests.unit.kernels.sampling.rows import batch, logits
from tests.unit.kernels.test_cpu_sampling import logits_of


@pytest.mark.parametrize("vocab", [3, 129, 1000])
def test_columns_choose_what_the_batch_chooses(kernels: Kernels, vocab: int) -> None:
    random, rows = np.random.default_rng(vocab), 40

    def some(*values: float) -> tuple[float, ...]:
        return tuple(random.choice(values, rows).tolist())

    asked = batch(
        rows, temperature=some(0.0, 1e-9, 0.3, 1.0, 50.0), top_k=tuple(map(int, some(-1, 0, 1, 5, 129, 5000))),
        top_p=some(0.0, 0.3, 0.9, 1.0), min_p=some(0.0, 1e-9, 0.02, 0.3, 1.0), seed=(*range(rows - 2), -5, 2**64 - 1),
    )  # fmt: skip
    drawn = torch.from_numpy(logits_of(random, rows, vocab))
    expected = kernels.sample(drawn.clone(), asked).tokens
    assert kernels.choose(drawn.clone(), Columns.on(drawn.device, asked, vocab)).tolist() == expected


def test_no_rows_choose_nothing(kernels: Kernels) -> None:
    empty = logits(1)[:0]
    assert kernels.choose(empty, Columns.on(empty.device, batch(0), 1000)).tolist() == []


def test_what_columns_cannot_say() -> None:
    assert chosen_by_columns(batch(3))
    for other in (
        batch(1, banned=(7,)),
        batch(1, adjust=(Adjustment(bias=((1, 2.0),)),)),
        batch(1, forced=(4,)),
        batch(1, logprobs=(0,)),
    ):
        assert not chosen_by_columns(other)
