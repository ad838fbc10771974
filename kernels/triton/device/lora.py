"""Low-rank adapters of many requests at once: rows are sorted by adapter, and each tile belongs to one of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(starts, tile, adapters, BLOCK_M: tl.constexpr):
    """Rows begin : end of a tile in the sorted order, and its adapter; adapter a's tiles begin at starts[a] / M + a."""
    low, high = 0, adapters
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) // BLOCK_M + middle <= tile:
            low = middle + 1
        else:
            high = middle
    adapter = low - 1
    first = tl.load(starts + adapter)
    begin = first + (tile - first // BLOCK_M - adapter) * BLOCK_M
    return adapter, begin, tl.load(starts + adapter + 1)


@triton.jit
def shrink_kernel(
    x, weights, out, order, starts, adapters, inputs,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (t, part): rows of x [T, in] times their adapter's matrix [A, parts, RANK, in], into out [T, parts, RANK]
    float32."""
    adapter, begin, end = _tile(starts, tl.program_id(0), adapters, BLOCK_M)
    if begin >= end:
        return
    m, r = begin + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    row = tl.load(order + m, mask=m < end, other=0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    weights += (adapter.to(tl.int64) * parts + part) * RANK * inputs
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + row[:, None] * inputs + k[None, :], mask=(m[:, None] < end) & (k[None, :] < inputs), other=0.0)
        w = tl.load(
            weights + r[:, None] * inputs + k[None, :], mask=(r[:, None] < RANK) & (k[None, :] < inputs), other=0.0
        )
        acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
    at = (row[:, None] * parts + part) * RANK + r[None, :]
    tl.store(out + at, acc, mask=(m[:, None] < end) & (r[None, :] < RANK))


@triton.jit
def expand_kernel(
    low, weights, bounds, out, order, starts, adapters, outputs,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (t, n, part): add low [T, parts, RANK] times the adapter's matrix [A, out, RANK] to the part's columns
    bounds[part] : bounds[part + 1] of out [T, out]."""
    adapter, begin, end = _tile(starts, tl.program_id(0), adapters, BLOCK_M)
    if begin >= end:
        return
    m, r = begin + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    part, parts = tl.program_id(2), tl.num_programs(2)
    last = tl.load(bounds + part + 1)
    n = tl.load(bounds + part) + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(order + m, mask=m < end, other=0).to(tl.int64)
    weights += adapter.to(tl.int64) * RANK * outputs
    at = (row[:, None] * parts + part) * RANK + r[None, :]
    a = tl.load(low + at, mask=(m[:, None] < end) & (r[None, :] < RANK), other=0.0)
    w = tl.load(weights + n[:, None] * RANK + r[None, :], mask=(n[:, None] < last) & (r[None, :] < RANK), other=0.0)
    product = tl.dot(a.to(w.dtype), tl.trans(w), input_precision=PRECISION)
    at = row[:, None] * outputs + n[None, :]
    there = (m[:, None] < end) & (n[None, :] < last)
    before = tl.load(out + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, (before + product).to(out.dtype.element_ty), mask=there)
