"""One pass over a token's q, k and v: norm of each head, rotation, and the write into its page, quantised if asked."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _put(
    value, scale, mask, q, keys, values, heads_at, page_at, is_query, is_key, is_value,
    SCALED: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Store some components of the heads where each belongs; int8 is rounded half up, float8 by its conversion."""
    tl.store(q + heads_at, value.to(q.dtype.element_ty), mask=mask & is_query[:, None])
    if SCALED:
        value = value / scale[:, None]
    if ROUND:
        value = tl.floor(value + 0.5)
    stored = value.to(keys.dtype.element_ty)
    tl.store(keys + page_at, stored, mask=mask & is_key[:, None])
    tl.store(values + page_at, stored, mask=mask & is_value[:, None])


@triton.jit
def rotary_kernel(
    qkv, cos_sin, positions, q_norm, k_norm, eps, q, keys, values, key_scales, value_scales, pages, lines, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, NORM: tl.constexpr,
    SCALED: tl.constexpr, ROUND: tl.constexpr, GREATEST: tl.constexpr,
):  # fmt: skip
    """Program b: BLOCK heads of all tokens' H + 2G in a row. Components 2 * HALF : D aren't rotated."""
    TOTAL: tl.constexpr = HEADS + 2 * KV_HEADS
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, head = row // TOTAL, row % TOTAL
    exists = token < tokens
    is_query = exists & (head < HEADS)
    is_key = exists & (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = exists & (head >= HEADS + KV_HEADS)
    turns = (head < HEADS + KV_HEADS)[:, None]

    i = tl.arange(0, BLOCK_HALF)
    line = row.to(tl.int64)[:, None] * D
    pair = exists[:, None] & (i < HALF)[None, :]
    first = tl.load(qkv + line + i[None, :], mask=pair, other=0).to(tl.float32)
    second = tl.load(qkv + line + HALF + i[None, :], mask=pair, other=0).to(tl.float32)
    if BLOCK_REST:
        j = tl.arange(0, BLOCK_REST)
        behind = exists[:, None] & (j < D - 2 * HALF)[None, :]
        rest = tl.load(qkv + line + 2 * HALF + j[None, :], mask=behind, other=0).to(tl.float32)

    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if BLOCK_REST:
            squares += tl.sum(rest * rest, 1)
        factor = tl.where(turns, tl.rsqrt(squares / D + eps)[:, None], 1.0)
        first *= factor * _weight(q_norm, k_norm, i, HALF, is_query, turns)
        second *= factor * _weight(q_norm + HALF, k_norm + HALF, i, HALF, is_query, turns)
        if BLOCK_REST:
            rest *= factor * _weight(q_norm + 2 * HALF, k_norm + 2 * HALF, j, D - 2 * HALF, is_query, turns)

    position = tl.load(positions + token, mask=exists, other=0).to(tl.int64)
    angle = cos_sin + position[:, None] * (2 * HALF) + i[None, :]
    cos = tl.load(angle, mask=pair & turns, other=1)
    sin = tl.load(angle + HALF, mask=pair & turns, other=0)
    low = first * cos - second * sin
    high = second * cos + first * sin

    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
    stored = is_key | is_value
    place = kv_head * PAGE + tl.load(lines + token, mask=stored, other=0)
    page = tl.load(pages + token, mask=stored, other=0).to(tl.int64) * UNIT
    page_at = (page + place * D)[:, None]
    heads_at = (token.to(tl.int64) * HEADS + head)[:, None] * D
    scale = tl.full([BLOCK], 1.0, tl.float32)
    if SCALED:
        greatest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        if BLOCK_REST:
            greatest = tl.maximum(greatest, tl.max(tl.abs(rest), 1))
        tl.store(key_scales + page // 4 + place, greatest / GREATEST, mask=is_key)
        tl.store(value_scales + page // 4 + place, greatest / GREATEST, mask=is_value)
        scale = tl.where(greatest > 0, greatest / GREATEST, 1.0)
    _put(low, scale, pair, q, keys, values, heads_at + i[None, :], page_at + i[None, :], is_query, is_key, is_value,
         SCALED, ROUND)  # fmt: skip
    _put(high, scale, pair, q, keys, values, heads_at + HALF + i[None, :], page_at + HALF + i[None, :], is_query,
         is_key, is_value, SCALED, ROUND)  # fmt: skip
    if BLOCK_REST:
        _put(rest, scale, behind, q, keys, values, heads_at + 2 * HALF + j[None, :], page_at + 2 * HALF + j[None, :],
             is_query, is_key, is_value, SCALED, ROUND)  # fmt: skip


@triton.jit
def _weight(q_norm, k_norm, i, count, is_query, turns):
    """The norm's weight of each head's components, 1 for values."""
    inside = i < count
    of_query = tl.load(q_norm + i, mask=inside, other=0)[None, :]
    of_key = tl.load(k_norm + i, mask=inside, other=0)[None, :]
    return tl.where(turns, tl.where(is_query[:, None], of_query, of_key), 1.0)
