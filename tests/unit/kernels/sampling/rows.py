"""Rows of logits and what is drawn from them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.protocol import Kernels
from kernels.sampling import SamplingBatch

VOCAB = 1000
MOST_DRAWS = 32
"""Rows that interpreted kernels may draw at once, a tenth of a second for each: what needs more is left to the exact
comparison with the reference in `triton/interpreted/test_sampling.py`."""


def batch(rows: int, **parameters: Any) -> SamplingBatch:
    """`rows` rows of one request each, seeded by their number; a parameter is one value or one for each row."""
    values: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": tuple(range(rows)),
        "position": 7,
        "banned": (),
    } | parameters
    per_row = {
        name: value if isinstance(value, tuple) and (value or rows == 0) and name != "banned" else (value,) * rows
        for name, value in values.items()
    }
    made = SamplingBatch(**per_row)
    draws = sum(not made.is_greedy(row) for row in range(rows))
    if os.environ.get("TRITON_INTERPRET") == "1" and draws > MOST_DRAWS:
        pytest.skip(f"{draws} draws take the interpreter too long")
    return made


def logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> Tensor:
    one = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return one.repeat(rows, 1)


def drawn(kernels: Kernels, rows: Tensor, **parameters: Any) -> list[int]:
    return kernels.sample(rows.clone(), batch(len(rows), **parameters)).tokens


def order(row: Tensor) -> list[int]:
    """Ids, the likeliest first, equal ones by id."""
    return sorted(range(len(row)), key=lambda i: (-float(row[i]), i))
