"""Products with adapters of their rows, and what they should be."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.adapters import Adapters

INPUTS = 100


def adapted_product(
    of_row: Tensor, widths: tuple[int, ...], rank: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Adapters]:
    """x [T, in], out [T, sum of widths] and adapters for the rows that `of_row` [T] gives them to."""
    count, outputs, parts = int(of_row.max()) + 1, sum(widths), len(widths)

    def randn(*shape: int, seed: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    shrink = (randn(count, parts, rank, INPUTS, seed=2) / 10).to(dtype)
    expand = (randn(count, outputs, rank, seed=3) / 5).to(dtype)
    x, out = randn(len(of_row), INPUTS, seed=0).to(dtype), randn(len(of_row), outputs, seed=1).to(dtype)
    return x, out, Adapters.of(shrink, expand, widths)


def plainly_adapted(x: Tensor, out: Tensor, of_row: Tensor, adapters: Adapters) -> Tensor:
    """What becomes of `out`, row by row in float64."""
    expected = out.double()
    for row, adapter in enumerate(of_row.tolist()):
        if adapter < 0:
            continue
        columns = expected[row].split(adapters.widths)
        factors = adapters.expand[adapter].double().split(adapters.widths)
        for part, shrink in enumerate(adapters.shrink[adapter].double()):
            columns[part].add_(factors[part] @ (shrink @ x[row].double()))
    return expected
