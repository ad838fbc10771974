"""Sampling parameters of a step as tensors, a column for each: what a device needs to choose by itself.

Of rows that draw, or take the greatest logit. What else a `SamplingBatch` may ask of a row takes the host.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling import SamplingBatch

INFINITE_KEY = 0x7F800000


@dataclass(frozen=True, slots=True)
class Columns:
    """S rows; every column is contiguous."""

    temperature: Tensor
    """[S] float64, 0 for greedy rows"""
    top_p: Tensor
    """[S] float64"""
    seed: Tensor
    """[S] int64"""
    limit: Tensor
    """[S] int32: the first key that `min_p` cuts off (`limit_key`)"""
    top_k: Tensor
    """[S] int32, the vocabulary's size if there is no such cut"""
    position: Tensor
    """[S] int32"""

    @classmethod
    def on(cls, device: torch.device, batch: SamplingBatch, vocab: int) -> Columns:
        """The columns of a batch on a device."""
        return cls(*(torch.from_numpy(column).to(device, non_blocking=True) for column in columns_of(batch, vocab)))


def columns_of(batch: SamplingBatch, vocab: int) -> list[NDArray[Any]]:
    """What `Columns` holds, in its order."""
    rows = range(len(batch.temperature))
    return [
        np.array([0.0 if batch.is_greedy(row) else batch.temperature[row] for row in rows], np.float64),
        np.array(batch.top_p, np.float64),
        np.array([_signed(seed) for seed in batch.seed], np.int64),
        np.array([limit_key(min_p) for min_p in batch.min_p], np.int32),
        np.array([top_k if 0 < top_k < vocab else vocab for top_k in batch.top_k], np.int32),
        np.array(batch.position, np.int32),
    ]


def chosen_by_columns(batch: SamplingBatch) -> bool:
    """Whether the columns say all that is asked of the rows."""
    return batch.adjust is None and batch.forced is None and batch.logprobs is None and not any(batch.banned)


def limit_key(min_p: float) -> int:
    """The first key that `min_p` cuts off: the bits of the greatest float32 distance that it keeps, and one more."""
    if min_p <= 0:
        return INFINITE_KEY
    distance = -math.log(min_p)
    nearest = np.float32(distance)
    kept = np.nextafter(nearest, np.float32(0)) if float(nearest) > distance else nearest
    return int(struct.unpack("<i", struct.pack("<f", kept))[0]) + 1


def _signed(seed: int) -> int:
    """The low 64 bits of a seed as torch holds them."""
    low = seed & (2**64 - 1)
    return low - 2**64 if low >= 2**63 else low
