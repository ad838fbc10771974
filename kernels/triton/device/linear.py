"""Products with weights of one byte or half of one, whose scales belong to groups of inputs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def int8_kernel(
    x, weight, scales, bias, out, rows, outputs, inputs,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (n, m): x [T, in] times int8 weight [out, in] with scales [out, in / GROUP]; a group is one step."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, GROUP)
    line = n.to(tl.int64)[:, None] * inputs
    column = m.to(tl.int64)[:, None] * inputs
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(0, inputs // GROUP):
        a = tl.load(x + column + group * GROUP + k[None, :], mask=m[:, None] < rows, other=0.0)
        w = tl.load(weight + line + group * GROUP + k[None, :], mask=n[:, None] < outputs, other=0)
        scale = tl.load(scales + n * (inputs // GROUP) + group, mask=n < outputs, other=0).to(tl.float32)
        w = (w.to(tl.float32) * scale[:, None]).to(x.dtype.element_ty)
        acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + n, mask=n < outputs, other=0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(m[:, None] < rows) & (n[None, :] < outputs))


@triton.jit
def int4_kernel(
    x, weight, scales, minimums, bias, out, rows, outputs, inputs,
    RUN: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MINIMUMS: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `int8_kernel`, with two inputs to a byte, a run of which is one step: byte j of a run holds inputs j (low
    half) and j + RUN / 2. A group is a run or half of one. A 0 stands for minimums [out, in / GROUP], or for -8 times
    the scale."""
    HALF: tl.constexpr = RUN // 2
    GROUPS: tl.constexpr = RUN // GROUP
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, HALF)
    line = n.to(tl.int64)[:, None] * (inputs // 2)
    column = m.to(tl.int64)[:, None] * inputs
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for run in range(0, inputs // RUN):
        a = tl.load(x + column + run * RUN + k[None, :], mask=m[:, None] < rows, other=0.0)
        b = tl.load(x + column + run * RUN + HALF + k[None, :], mask=m[:, None] < rows, other=0.0)
        w = tl.load(weight + line + run * HALF + k[None, :], mask=n[:, None] < outputs, other=0)
        at = n * (inputs // GROUP) + run * GROUPS
        scale = tl.load(scales + at, mask=n < outputs, other=0).to(tl.float32)[:, None]
        zero = -8 * scale
        if MINIMUMS:
            zero = tl.load(minimums + at, mask=n < outputs, other=0).to(tl.float32)[:, None]
        low = ((w & 15).to(tl.float32) * scale + zero).to(x.dtype.element_ty)
        if GROUPS == 2:
            scale = tl.load(scales + at + 1, mask=n < outputs, other=0).to(tl.float32)[:, None]
            zero = -8 * scale
            if MINIMUMS:
                zero = tl.load(minimums + at + 1, mask=n < outputs, other=0).to(tl.float32)[:, None]
        high = ((w >> 4).to(tl.float32) * scale + zero).to(x.dtype.element_ty)
        acc = tl.dot(a, tl.trans(low), acc, input_precision=PRECISION)
        acc = tl.dot(b, tl.trans(high), acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + n, mask=n < outputs, other=0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(m[:, None] < rows) & (n[None, :] < outputs))
