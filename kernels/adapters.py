"""Low-rank adapters of a product, and which rows of a step have which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a step that have an adapter, sorted by it."""

    order: Tensor
    """[n] int32 rows."""
    starts: Tensor
    """[A + 1] int32: adapter a has order[starts[a] : starts[a + 1]]."""

    @classmethod
    def of(cls, adapter_of_row: Tensor, adapters: int) -> AdapterRows:
        """[T] int adapter of each row, -1 for none."""
        order = adapter_of_row.argsort(stable=True).to(torch.int32)
        bounds = torch.arange(adapters + 1, device=adapter_of_row.device, dtype=adapter_of_row.dtype)
        starts = torch.searchsorted(adapter_of_row.sort().values, bounds).to(torch.int32)
        return cls(order, starts)


@dataclass(frozen=True, slots=True)
class Adapters:
    """What A adapters add to a product of P joined matrices, padded to one rank: y[part] += B[part] (A[part] x)."""

    shrink: Tensor
    """[A, P, rank, in]"""
    expand: Tensor
    """[A, out, rank], the outputs of the parts one behind the other; the adapters' scales are in it."""
    bounds: Tensor
    """[P + 1] int32: part p has the outputs bounds[p] : bounds[p + 1]."""
    widths: tuple[int, ...]
    """[P] outputs of each part."""

    @classmethod
    def of(cls, shrink: Tensor, expand: Tensor, widths: Sequence[int]) -> Adapters:
        bounds = torch.tensor([0, *accumulate(widths)], dtype=torch.int32, device=shrink.device)
        return cls(shrink, expand, bounds, tuple(widths))

    @property
    def size_bytes(self) -> int:
        return self.shrink.nbytes + self.expand.nbytes
