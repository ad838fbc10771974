"""Paged attention in plain torch: gather each request's pages, then scaled dot product attention.

Requests with one row are attended together, in groups of similar context length; longer chunks one
by one. Which rows, which slots and which masks depends on the step alone, so it is planned once for
all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.kv import KVLayout
from kernels.protocol import AttentionMetadata

GROUP_COST_TOKENS = 200
"""One more group costs about as much as attending to this many padding tokens."""


class PagedKV(NamedTuple):
    """One layer's keys and values: a token's heads, G * D elements, are row `AttentionPlan.rows` of each.

    A page's block is [B, G, D] keys, then as many values. Pages don't follow each other evenly, so row r of
    the views begins at element r: rows overlap, and those that are used don't.
    """

    keys: Tensor
    values: Tensor
    kv_heads: int


def kv_views(storage: Tensor, layout: KVLayout, dtype: torch.dtype) -> list[PagedKV]:
    """Each layer's keys and values in `storage` [bytes] uint8."""
    elements = storage.view(dtype)
    width = layout.kv_heads * layout.head_size
    half = layout.layer_bytes // layout.element_bytes // 2

    def rows(start: int) -> Tensor:
        return elements.as_strided((len(elements) - start - width + 1, width), (1, 1), start)

    return [
        PagedKV(rows(2 * layer * half), rows((2 * layer + 1) * half), layout.kv_heads) for layer in range(layout.layers)
    ]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """n requests with one row each, padded to the longest of their contexts, C tokens."""

    rows: Tensor
    """[n] rows of the step."""
    context: Tensor
    """[n * C] rows to gather. Padding repeats the request's own last token, so no stale memory is read."""
    mask: Tensor | None
    """[n, 1, 1, C], -inf on padding; None if there is none."""
    size: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one request, the last of its C context tokens."""

    start: int
    end: int
    context: Tensor
    """[C] rows to gather."""
    mask: Tensor | None
    """[rows, C], -inf after each row's own position; None if the chunk is the whole context."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    rows: Tensor
    """[T] rows of `PagedKV` to write, int64."""
    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


def plan(meta: AttentionMetadata, dtype: torch.dtype) -> AttentionPlan:
    """Lay out one step's attention for all layers."""
    starts = meta.query_start.tolist()
    contexts = meta.context_len.tolist()
    decodes = [r for r in range(len(contexts)) if starts[r + 1] - starts[r] == 1]
    chunks = [r for r in range(len(contexts)) if starts[r + 1] - starts[r] > 1]
    return AttentionPlan(
        rows=_rows(meta.layout, meta.slots.long()),
        decodes=tuple(_decode_group(meta, g, contexts, dtype) for g in group_by_context(decodes, contexts)),
        chunks=tuple(_chunk(meta, r, starts[r], starts[r + 1], contexts[r], dtype) for r in chunks),
    )


def group_by_context(requests: Sequence[int], context_len: Sequence[int]) -> list[list[int]]:
    """Split requests into groups whose padding to their longest member is worth less than another group."""
    groups: list[list[int]] = []
    padding = 0
    for request in sorted(requests, key=lambda r: -context_len[r]):
        if groups:
            padding += context_len[groups[-1][0]] - context_len[request]
        if not groups or padding > GROUP_COST_TOKENS:
            groups.append([])
            padding = 0
        groups[-1].append(request)
    return groups


def _decode_group(
    meta: AttentionMetadata, requests: list[int], context_len: list[int], dtype: torch.dtype
) -> DecodeGroup:
    device = meta.slots.device
    members = torch.tensor(requests, device=device)
    lengths = meta.context_len[members].long()[:, None]
    longest, shortest = context_len[requests[0]], context_len[requests[-1]]
    tokens = torch.arange(longest, device=device)[None]
    mask = None
    if shortest < longest:
        mask = torch.zeros(len(requests), longest, dtype=dtype, device=device)
        mask = mask.masked_fill_(tokens >= lengths, float("-inf"))[:, None, None]
    return DecodeGroup(
        rows=meta.query_start[members].long(),
        context=_context(meta, members, tokens.minimum(lengths - 1)).flatten(),
        mask=mask,
        size=len(requests),
    )


def _chunk(meta: AttentionMetadata, request: int, start: int, end: int, context: int, dtype: torch.dtype) -> Chunk:
    device = meta.slots.device
    tokens = torch.arange(context, device=device)[None]
    mask = None
    if end - start < context:
        own = torch.arange(context - (end - start), context, device=device)[:, None]
        mask = torch.zeros(end - start, context, dtype=dtype, device=device).masked_fill_(tokens > own, float("-inf"))
    member = torch.tensor([request], device=device)
    return Chunk(start=start, end=end, context=_context(meta, member, tokens).flatten(), mask=mask)


def _context(meta: AttentionMetadata, requests: Tensor, tokens: Tensor) -> Tensor:
    """Rows of the tokens [n, C] of requests [n]."""
    page_size = meta.layout.page_size
    pages = meta.block_table[requests].long().gather(1, tokens // page_size)
    return _rows(meta.layout, pages * page_size + tokens % page_size)


def _rows(layout: KVLayout, slots: Tensor) -> Tensor:
    """Where the slots' rows of `PagedKV` begin, in elements."""
    pages, offsets = slots // layout.page_size, slots % layout.page_size
    extents, places = pages // layout.pages_per_extent, pages % layout.pages_per_extent
    begin = extents * (layout.extent_bytes // layout.element_bytes) + places * (
        layout.page_bytes // layout.element_bytes
    )
    return begin + offsets * (layout.kv_heads * layout.head_size)


def attend(q: Tensor, kv: PagedKV, plan: AttentionPlan, scale: float) -> Tensor:
    """Causal attention of q [T, H, D] over each request's context."""
    out = torch.empty_like(q)
    for group in plan.decodes:
        _attend_decodes(q, kv, group, scale, out)
    for chunk in plan.chunks:
        _attend_chunk(q, kv, chunk, scale, out)
    return out


def _attend_decodes(q: Tensor, kv: PagedKV, group: DecodeGroup, scale: float, out: Tensor) -> None:
    """The query heads that share a key head stand as one block of queries: [n, G, H / G, D]."""
    n, kv_heads, head_size = group.size, kv.kv_heads, q.shape[2]
    keys, values = (
        pool.index_select(0, group.context).view(n, -1, kv_heads, head_size).transpose(1, 2)
        for pool in (kv.keys, kv.values)
    )
    queries = q.index_select(0, group.rows).view(n, kv_heads, -1, head_size)
    attended = scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, scale=scale)
    out.index_copy_(0, group.rows, attended.reshape(n, -1, head_size))


def _attend_chunk(q: Tensor, kv: PagedKV, chunk: Chunk, scale: float, out: Tensor) -> None:
    """The batch runs over key heads, the heads over the queries that share one: [G, H / G, rows, D]."""
    rows, kv_heads, head_size = chunk.end - chunk.start, kv.kv_heads, q.shape[2]
    shared = q.shape[1] // kv_heads
    keys, values = (
        pool.index_select(0, chunk.context)
        .view(-1, kv_heads, head_size)
        .transpose(0, 1)[:, None]
        .expand(-1, shared, -1, -1)
        for pool in (kv.keys, kv.values)
    )
    queries = q[chunk.start : chunk.end].view(rows, kv_heads, shared, head_size).permute(1, 2, 0, 3)
    attended = scaled_dot_product_attention(
        queries, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None, scale=scale
    )
    out[chunk.start : chunk.end] = attended.permute(2, 0, 1, 3).reshape(rows, -1, head_size)
