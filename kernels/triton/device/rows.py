"""What works on rows one by one: norms and gated activations."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, eps, columns, BLOCK: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """Program t: one row. With ADD, x is added to the float32 residual, which is written back and normalised."""
    row = tl.program_id(0).to(tl.int64) * columns
    i = tl.arange(0, BLOCK)
    inside = i < columns
    value = tl.load(x + row + i, mask=inside, other=0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + i, mask=inside, other=0)
        tl.store(residual + row + i, value, mask=inside)
    factor = tl.rsqrt(tl.sum(value * value, 0) / columns + eps)
    scale = tl.load(weight + i, mask=inside, other=0).to(tl.float32)
    tl.store(out + row + i, (value * factor * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_kernel(gate_up, out, inner, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Program (t, b): a block of row t; SiLU or the tanh form of GELU of the first half, times the second."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < inner
    gate = tl.load(gate_up + row * 2 * inner + i, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + i, mask=inside, other=0).to(tl.float32)
    slope = gate
    if GELU:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + row * inner + i, (gate * tl.sigmoid(slope) * up).to(out.dtype.element_ty), mask=inside)
