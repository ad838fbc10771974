"""How products with quantised weights are launched."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton import configs
from kernels.triton.configs import Architecture
from kernels.triton.device.linear import int4_kernel, int8_kernel
from kernels.weights import RUN, QuantisedWeight


class QuantisedLinear:
    """A weight of integers, multiplied as it is: its numbers are restored on the way to the matrix unit."""

    def __init__(self, architecture: Architecture, weight: QuantisedWeight, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self._architecture = architecture
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        out = torch.empty(rows, self.out_features, dtype=x.dtype, device=x.device)
        if not rows:
            return out
        weight, group = self._weight, self._weight.group
        step_bytes = group if weight.bits == 8 else RUN // 2
        tile = configs.linear(self._architecture, rows, x.element_size(), step_bytes)
        # Columns first: programs that run at once share the rows of x, and each weight is read by few of them.
        grid = -(-self.out_features // tile.columns), -(-rows // tile.rows)
        bias, sizes = x if self._bias is None else self._bias, (rows, self.out_features, self.in_features)
        options = {
            "GROUP": group, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BIAS": self._bias is not None,
            "PRECISION": configs.precision(self._architecture, x.dtype), "num_warps": tile.warps,
            "num_stages": tile.stages,
        }  # fmt: skip
        if weight.bits == 8:
            int8_kernel[grid](x, weight.numbers, weight.scales, bias, out, *sizes, **options)
        else:
            minimums = weight.scales if weight.minimums is None else weight.minimums
            int4_kernel[grid](
                x, weight.numbers, weight.scales, minimums, bias, out, *sizes,
                RUN=RUN, MINIMUMS=weight.minimums is not None, **options,
            )  # fmt: skip
        return out
