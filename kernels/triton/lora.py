"""How the kernels of low-rank adapters are launched."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.adapters import AdapterRows, Adapters
from kernels.triton import configs
from kernels.triton.configs import Architecture
from kernels.triton.device.lora import expand_kernel, shrink_kernel


def add_adapters(x: Tensor, out: Tensor, rows: AdapterRows, adapters: Adapters, architecture: Architecture) -> None:
    """Add to out [T, out] what each row's adapter makes of x [T, in]."""
    count, parts, rank, inputs = adapters.shrink.shape
    tile = configs.lora(architecture)
    tiles = len(rows.order) // tile.rows + count
    low = torch.empty(len(x), parts, rank, dtype=torch.float32, device=x.device)
    block = max(16, triton.next_power_of_2(rank))
    precision = configs.precision(architecture, x.dtype)
    shrink_kernel[tiles, parts](
        x, adapters.shrink, low, rows.order, rows.starts, count, inputs, RANK=rank, BLOCK_R=block, BLOCK_M=tile.rows,
        BLOCK_K=tile.columns, PRECISION=precision, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    expand_kernel[tiles, -(-max(adapters.widths) // tile.columns), parts](
        low, adapters.expand, adapters.bounds, out, rows.order, rows.starts, count, out.shape[1], RANK=rank,
        BLOCK_R=block, BLOCK_M=tile.rows, BLOCK_N=tile.columns, PRECISION=precision, num_warps=tile.warps, num_stages=1,
    )  # fmt: skip
