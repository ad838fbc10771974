"""Weights of one byte or half of one for each number, multiplied as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton import configs
from kernels.triton.configs import Architecture
from kernels.triton.device.linear import int4_kernel, int8_kernel

GROUP = 64
"""Inputs that share a scale."""
GREATEST = {8: 127, 4: 7}


class QuantisedLinear:
    """A weight [out, in] as signed integers of 8 or 4 bits, with a float32 scale for each `GROUP` inputs."""

    def __init__(self, architecture: Architecture, bits: int, packed: Tensor, scales: Tensor, bias: Tensor | None):
        """`packed` is [out, in] int8, or [out, in / 2] uint8 as `pack_int4` makes it; `scales` [out, in / GROUP]."""
        self.out_features, self.in_features = packed.shape[0], scales.shape[1] * GROUP
        self._architecture = architecture
        self._bits = bits
        self._packed = packed
        self._scales = scales
        self._bias = bias

    @classmethod
    def of(cls, architecture: Architecture, bits: int, weight: Tensor, bias: Tensor | None = None) -> QuantisedLinear:
        """Round a weight [out, in] to the nearest."""
        quantised, scales = quantise(weight, bits)
        return cls(architecture, bits, quantised if bits == 8 else pack_int4(quantised), scales, bias)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        out = torch.empty(rows, self.out_features, dtype=x.dtype, device=x.device)
        if not rows:
            return out
        tile = configs.linear(self._architecture, rows, x.element_size(), self._bits)
        kernel = int8_kernel if self._bits == 8 else int4_kernel
        # Columns first: programs that run at once share the rows of x, and each weight is read by few of them.
        kernel[-(-self.out_features // tile.columns), -(-rows // tile.rows)](
            x, self._packed, self._scales, x if self._bias is None else self._bias, out, rows, self.out_features,
            self.in_features,
            GROUP=GROUP, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BIAS=self._bias is not None,
            PRECISION=configs.precision(self._architecture, x.dtype), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out


def quantise(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """[out, in] -> int8 [out, in] of so many bits, symmetric around 0, and float32 scales [out, in / GROUP]."""
    outputs, inputs = weight.shape
    if inputs % GROUP:
        raise ValueError(f"a weight of {inputs} inputs can't be cut into groups of {GROUP}")
    groups = weight.float().view(outputs, -1, GROUP)
    scales = groups.abs().amax(-1) / GREATEST[bits]
    rounded = (groups / scales.clamp(min=1e-30)[..., None]).round()
    return rounded.to(torch.int8).view(outputs, inputs), scales


def pack_int4(quantised: Tensor) -> Tensor:
    """int8 [out, in] of -8 to 7 -> uint8 [out, in / 2]: a group's first half in the low bits, the other above it."""
    low, high = (quantised.view(len(quantised), -1, 2, GROUP // 2) + 8).to(torch.uint8).unbind(2)
    return (low | (high << 4)).flatten(1)
