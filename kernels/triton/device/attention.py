"""Paged attention: one loop over a range of a context, used by decode (split over the context) and by prefill.

A page holds, for one layer, keys [G, B, D], then values [G, B, D], and if they are quantised a float32 scale for
each key [G, B] and each value [G, B]. `pages` counts in UNIT elements, which tells the compiler
that rows are aligned. Scores are kept in units of log2, so that weights are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend(
    q, position, top, total, acc, first, end, pages, keys, values, key_scales, value_scales, kv_head, scale, window,
    soft_cap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows q [M, BLOCK_D] at `position` [M] meet tokens first : end; go on from greatest score, sum and output."""
    d = tl.arange(0, BLOCK_D)
    inside = d[None, :] < D
    for start in range(first, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        here = token < end
        page = tl.load(pages + token // PAGE, mask=here, other=0).to(tl.int64) * UNIT
        line = kv_head * PAGE + token % PAGE
        row = page + line * D
        wanted = here[:, None] & inside
        k = tl.load(keys + row[:, None] + d[None, :], mask=wanted, other=0.0)
        if SCALED:
            k = k.to(tl.float32) * tl.load(key_scales + (page // 4 + line), mask=here, other=0)[:, None]
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale
        if SOFT_CAP:
            scores = soft_cap * (2 * tl.sigmoid(2 * scores) - 1)
        visible = here[None, :] & (token[None, :] <= position[:, None])
        if WINDOW:
            visible &= token[None, :] > position[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        greater = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(greater == float("-inf"), 0.0, greater)
        weight = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weight, 1)
        v = tl.load(values + row[:, None] + d[None, :], mask=wanted, other=0.0)
        if SCALED:
            v = v.to(tl.float32) * tl.load(value_scales + (page // 4 + line), mask=here, other=0)[:, None]
        acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision=PRECISION)
        top = greater
    return top, total, acc


@triton.jit
def decode_kernel(
    q, sums, tops, totals, keys, values, key_scales, value_scales, pages, query_start, context_len, scale, window,
    soft_cap, width, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (r, g, s): the query heads of key head g of request r over tokens s * SPLIT : (s + 1) * SPLIT."""
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(query_start + request)
    context = tl.load(context_len + request)
    if tl.load(query_start + request + 1) - row != 1:
        return
    first = split * SPLIT
    end = tl.minimum(first + SPLIT, context)
    if WINDOW:
        first = tl.maximum(first, context - window)
    if first >= end:
        return
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + m
    mine = (m[:, None] < GROUP) & (d[None, :] < D)
    at = (row * HEADS + head)[:, None] * D + d[None, :]
    queries = tl.load(q + at, mask=mine, other=0)
    position = tl.where(m < GROUP, context - 1, -1)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top, total, acc = _attend(
        queries, position, top, total, acc, first, end, pages + request * width, keys, values, key_scales,
        value_scales, kv_head, scale, window, soft_cap,
        D, BLOCK_D, PAGE, BLOCK_N, UNIT, WINDOW, SOFT_CAP, SCALED, PRECISION,
    )  # fmt: skip
    place = (request.to(tl.int64) * HEADS + head) * splits + split
    tl.store(tops + place, top, mask=m < GROUP)
    tl.store(totals + place, total, mask=m < GROUP)
    tl.store(sums + place[:, None] * D + d[None, :], acc, mask=mine)


@triton.jit
def combine_kernel(
    out, sums, tops, totals, sinks, query_start, context_len, window, splits,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Program (r, h): one output row out of what the splits of request r left."""
    request, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(query_start + request)
    context = tl.load(context_len + request)
    if tl.load(query_start + request + 1) - row != 1:
        return
    first = 0
    if WINDOW:
        first = tl.maximum(context - window, 0) // SPLIT
    end = tl.cdiv(context, SPLIT)
    d = tl.arange(0, BLOCK_D)
    greatest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if SINKS:
        greatest = tl.zeros([1], tl.float32) + tl.load(sinks + head) * 1.4426950408889634
        total += 1
    acc = tl.zeros([BLOCK_D], tl.float32)
    place = (request.to(tl.int64) * HEADS + head) * splits
    for start in range(first, end, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        there = split < end
        top = tl.load(tops + place + split, mask=there, other=float("-inf"))
        part = tl.load(totals + place + split, mask=there, other=0)
        rows = tl.load(
            sums + (place + split)[:, None] * D + d[None, :], mask=there[:, None] & (d[None, :] < D), other=0
        )
        greater = tl.maximum(greatest, tl.max(top, 0))
        fade, weight = tl.exp2(greatest - greater), tl.exp2(top - greater)
        total = total * fade + tl.sum(part * weight, 0)
        acc = acc * fade + tl.sum(rows * weight[:, None], 0)
        greatest = greater
    tl.store(out + (row * HEADS + head) * D + d, (acc / total).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _request_of(query_start, tile, requests, BLOCK_Q: tl.constexpr):
    """The request that owns a tile: request r's tiles begin at query_start[r] // BLOCK_Q + r."""
    low, high = 0, requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def prefill_kernel(
    q, out, keys, values, key_scales, value_scales, sinks, pages, query_start, context_len, scale, window, soft_cap,
    width, requests,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, g): BLOCK_M // GROUP rows of one request, each with the GROUP query heads of key head g."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    request = _request_of(query_start, tile, requests, BLOCK_Q)
    row = tl.load(query_start + request)
    rows = tl.load(query_start + request + 1) - row
    context = tl.load(context_len + request)
    begin = (tile - row // BLOCK_Q - request) * BLOCK_Q
    if rows == 1:
        return
    if begin >= rows:
        return
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = begin + m // GROUP
    head = kv_head * GROUP + m % GROUP
    mine = (m < BLOCK_Q * GROUP) & (query < rows)
    position = tl.where(mine, context - rows + query, -1)
    at = ((row + query) * HEADS + head).to(tl.int64)[:, None] * D + d[None, :]
    wanted = mine[:, None] & (d[None, :] < D)
    queries = tl.load(q + at, mask=wanted, other=0.0)
    first = 0
    if WINDOW:
        first = tl.maximum(context - rows + begin - window + 1, 0)
    end = tl.minimum(context - rows + begin + BLOCK_Q, context)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        top = tl.load(sinks + head) * 1.4426950408889634
        total += 1
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top, total, acc = _attend(
        queries, position, top, total, acc, first, end, pages + request * width, keys, values, key_scales,
        value_scales, kv_head, scale, window, soft_cap,
        D, BLOCK_D, PAGE, BLOCK_N, UNIT, WINDOW, SOFT_CAP, SCALED, PRECISION,
    )  # fmt: skip
    tl.store(out + at, (acc / tl.where(mine, total, 1.0)[:, None]).to(out.dtype.element_ty), mask=wanted)
