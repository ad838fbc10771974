"""Low-rank adapters over a batch in which each row has its own, or none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.triton import configs
from kernels.triton.configs import Architecture
from kernels.triton.device.lora import expand_kernel, shrink_kernel


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a step sorted by adapter; those without one are left out."""

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
    """One layer's adapters, padded to one rank: y += scale * B (A x)."""

    shrink: Tensor
    """[A, rank, in]"""
    expand: Tensor
    """[A, out, rank]"""
    scales: Tensor
    """[A] float32"""


def add_adapters(x: Tensor, out: Tensor, rows: AdapterRows, adapters: Adapters, architecture: Architecture) -> None:
    """Add to out [T, out] what each row's adapter makes of x [T, in]."""
    count, rank, inputs = adapters.shrink.shape
    outputs = adapters.expand.shape[1]
    tile = configs.lora(architecture)
    tiles = len(rows.order) // tile.rows + count
    low = torch.empty(len(x), rank, dtype=torch.float32, device=x.device)
    block = max(16, triton.next_power_of_2(rank))
    precision = configs.precision(architecture, x.dtype)
    shrink_kernel[(tiles,)](
        x, adapters.shrink, low, rows.order, rows.starts, count, inputs, RANK=rank, BLOCK_R=block, BLOCK_M=tile.rows,
        BLOCK_K=tile.columns, PRECISION=precision, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    expand_kernel[tiles, -(-outputs // tile.columns)](
        low, adapters.expand, adapters.scales, out, rows.order, rows.starts, count, outputs, RANK=rank, BLOCK_R=block,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, PRECISION=precision, num_warps=tile.warps, num_stages=1,
    )  # fmt: skip
