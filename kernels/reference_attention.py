"""Paged attention in plain torch: gather each request's pages, then scaled dot product attention.

Requests with one row are attended together, in groups of similar context length; longer chunks one
by one. Which rows, which slots and which masks depends on the step and the window alone, so it is
planned once for all layers that have the same window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.kv import KVLayout, Thinning
from kernels.protocol import Attention, AttentionMetadata
from kernels.quantised import SCALE_BYTES, check_layout, quantise, restore
from kernels.thinning import chosen, pick, slots_of

GROUP_COST_TOKENS = 200
"""One more group costs about as much as attending to this many padding tokens."""

MOST_SCORES = 2**22
"""Attention that is written out holds at most so many scores at once, a few times over in float32."""


class PagedKV(NamedTuple):
    """One layer's keys and values: a token's heads, G * D elements, are row `AttentionPlan.rows` of each.

    A page's block is [B, G, D] keys, then as many values. Pages don't follow each other evenly, so row r of
    the views begins at element r: rows overlap, and those that are used don't. Quantised rows are bytes: [G, D]
    numbers, then the float32 scales [G].
    """

    keys: Tensor
    values: Tensor
    kv_heads: int
    quantised: torch.dtype | None

    def write(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [T, G, D] float32 into `rows` [T]."""
        for pool, x in ((self.keys, keys), (self.values, values)):
            if self.quantised is None:
                pool.index_copy_(0, rows, x.flatten(1).to(pool.dtype))
            else:
                numbers, scales = quantise(x, self.quantised)
                parts = [numbers.view(torch.uint8).flatten(1), scales.contiguous().view(torch.uint8)]
                pool.index_copy_(0, rows, torch.cat(parts, dim=1))

    def thin(self, rows: Tensor, work: Thinning) -> None:
        """Move what each head keeps of the context in `rows` [n] to the first of them."""
        tokens = chosen(self._read(self.keys, rows, torch.float32), work)
        for pool in (self.keys, self.values):
            found = pool.index_select(0, rows)
            parts = [found]
            if self.quantised is not None:
                parts = list(found.tensor_split([found.shape[1] - SCALE_BYTES * self.kv_heads], dim=1))
            kept = [pick(part.reshape(len(rows), self.kv_heads, -1), tokens).flatten(1) for part in parts]
            pool.index_copy_(0, rows[: work.kept], torch.cat(kept, dim=1))

    def read(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [n, G, D] of `rows` [n]."""
        return self._read(self.keys, rows, dtype), self._read(self.values, rows, dtype)

    def _read(self, pool: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        found = pool.index_select(0, rows)
        if self.quantised is None:
            return found.view(len(found), self.kv_heads, -1)
        numbers, scales = found.tensor_split([found.shape[1] - SCALE_BYTES * self.kv_heads], dim=1)
        heads = numbers.view(self.quantised).view(len(found), self.kv_heads, -1)
        return restore(heads, scales.contiguous().view(torch.float32)).to(dtype)


def kv_views(
    storage: Tensor, layout: KVLayout, dtype: torch.dtype, quantised: torch.dtype | None = None
) -> list[PagedKV]:
    """Each layer's keys and values in `storage` [bytes] uint8, of the type `dtype` unless they are quantised."""
    check_layout(layout, quantised or dtype)
    elements = storage if quantised else storage.view(dtype)
    width, half = _row_elements(layout), layout.layer_bytes // layout.element_bytes // 2

    def rows(start: int) -> Tensor:
        return elements.as_strided((len(elements) - start - width + 1, width), (1, 1), start)

    return [
        PagedKV(rows(2 * layer * half), rows((2 * layer + 1) * half), layout.kv_heads, quantised)
        for layer in range(layout.layers)
    ]


def _row_elements(layout: KVLayout) -> int:
    """Of a token's key or value in one layer, with their scales."""
    return layout.layer_bytes // (2 * layout.page_size * layout.element_bytes)


def thin(kv: Sequence[PagedKV], layout: KVLayout, work: Thinning) -> None:
    """Thin one request's context in all layers."""
    rows = _rows(layout, slots_of(work, layout, kv[0].keys.device))
    for layer in kv:
        layer.thin(rows, work)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """n requests with one row each, padded to the most tokens that one of them sees, C."""

    rows: Tensor
    """[n] rows of the step."""
    context: Tensor
    """[n * C] rows to gather. Padding repeats the request's own last token, so no stale memory is read."""
    mask: Tensor | None
    """[n, 1, 1, C], -inf on padding; None if there is none."""
    size: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one request, the last of the C tokens that they see."""

    start: int
    end: int
    context: Tensor
    """[C] rows to gather."""
    mask: Tensor | None
    """[rows, C], -inf on what a row doesn't see; None if each sees all up to its own of C = rows tokens."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What the rows of a step see through one window."""

    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    rows: Tensor
    """[T] rows of `PagedKV` to write, int64."""
    dtype: torch.dtype
    sights: dict[int | None, Sight] = field(default_factory=dict)
    """By window; filled by the first layer that has it."""


def plan(meta: AttentionMetadata, dtype: torch.dtype) -> AttentionPlan:
    """What all layers of one step share."""
    return AttentionPlan(_rows(meta.layout, meta.slots.long()), dtype)


def look(meta: AttentionMetadata, window: int | None, dtype: torch.dtype) -> Sight:
    """Lay out one step's attention for all layers of one window."""
    starts = meta.query_start.tolist()
    contexts = meta.context_len.tolist()
    reach = max(contexts) if window is None else window
    decodes = [r for r in range(len(contexts)) if starts[r + 1] - starts[r] == 1]
    chunks = [r for r in range(len(contexts)) if starts[r + 1] - starts[r] > 1]
    seen = [min(context, reach) for context in contexts]
    return Sight(
        decodes=tuple(_decode_group(meta, group, seen, dtype) for group in group_by_context(decodes, seen)),
        chunks=tuple(_chunk(meta, r, starts[r], starts[r + 1], contexts[r], reach, dtype) for r in chunks),
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


def _decode_group(meta: AttentionMetadata, requests: list[int], seen: list[int], dtype: torch.dtype) -> DecodeGroup:
    device = meta.slots.device
    members = torch.tensor(requests, device=device)
    lengths = torch.tensor([seen[request] for request in requests], device=device)[:, None]
    longest, shortest = seen[requests[0]], seen[requests[-1]]
    tokens = torch.arange(longest, device=device)[None]
    mask = None
    if shortest < longest:
        mask = torch.zeros(len(requests), longest, dtype=dtype, device=device)
        mask = mask.masked_fill_(tokens >= lengths, float("-inf"))[:, None, None]
    first = meta.context_len[members].long()[:, None] - lengths
    return DecodeGroup(
        rows=meta.query_start[members].long(),
        context=_context(meta, members, first + tokens.minimum(lengths - 1)).flatten(),
        mask=mask,
        size=len(requests),
    )


def _chunk(
    meta: AttentionMetadata, request: int, start: int, end: int, context: int, reach: int, dtype: torch.dtype
) -> Chunk:
    device = meta.slots.device
    rows = end - start
    first = max(0, context - rows - reach + 1)
    tokens = torch.arange(first, context, device=device)[None]
    mask = None
    if rows < context or rows > reach:
        own = torch.arange(context - rows, context, device=device)[:, None]
        mask = torch.zeros(rows, context - first, dtype=dtype, device=device)
        mask.masked_fill_((tokens > own) | (tokens <= own - reach), float("-inf"))
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
    return begin + offsets * _row_elements(layout)


def attend(q: Tensor, kv: PagedKV, meta: AttentionMetadata, attention: Attention) -> Tensor:
    """Causal attention of q [T, H, D] over what each row sees of its request's context."""
    planned: AttentionPlan = meta.plan
    if attention.window not in planned.sights:
        planned.sights[attention.window] = look(meta, attention.window, planned.dtype)
    sight = planned.sights[attention.window]
    out = torch.empty_like(q)
    for group in sight.decodes:
        _attend_decodes(q, kv, group, attention, out)
    for chunk in sight.chunks:
        for part in _parts(chunk, q.shape[1]) if _is_written_out(attention) else (chunk,):
            _attend_chunk(q, kv, part, attention, out)
    return out


def _parts(chunk: Chunk, heads: int) -> Iterator[Chunk]:
    """The rows of a chunk in so small parts that the scores of one are few enough to be held."""
    context, rows = len(chunk.context), chunk.end - chunk.start
    mask = chunk.mask
    if mask is None:
        later = torch.ones(rows, context, dtype=torch.bool, device=chunk.context.device).triu(1)
        mask = torch.zeros(rows, context, device=later.device).masked_fill_(later, float("-inf"))
    step = max(1, MOST_SCORES // (heads * context))
    for first in range(0, rows, step):
        end = min(first + step, rows)
        yield Chunk(chunk.start + first, chunk.start + end, chunk.context, mask[first:end])


def _is_written_out(attention: Attention) -> bool:
    """Torch's own operation knows neither caps nor sinks."""
    return attention.soft_cap is not None or attention.sinks is not None


def _attend_decodes(q: Tensor, kv: PagedKV, group: DecodeGroup, attention: Attention, out: Tensor) -> None:
    """The query heads that share a key head stand as one block of queries: [n, G, H / G, D]."""
    n, kv_heads, head_size = group.size, kv.kv_heads, q.shape[2]
    keys, values = (found.view(n, -1, kv_heads, head_size).transpose(1, 2) for found in kv.read(group.context, q.dtype))
    queries = q.index_select(0, group.rows).view(n, kv_heads, -1, head_size)
    sinks = None if attention.sinks is None else attention.sinks.view(1, kv_heads, -1, 1)
    attended = _weigh(queries, keys, values, group.mask, attention, sinks)
    out.index_copy_(0, group.rows, attended.reshape(n, -1, head_size))


def _attend_chunk(q: Tensor, kv: PagedKV, chunk: Chunk, attention: Attention, out: Tensor) -> None:
    """The batch runs over key heads, the heads over the queries that share one: [G, H / G, rows, D]."""
    rows, kv_heads, head_size = chunk.end - chunk.start, kv.kv_heads, q.shape[2]
    shared = q.shape[1] // kv_heads
    keys, values = (
        found.transpose(0, 1)[:, None].expand(-1, shared, -1, -1) for found in kv.read(chunk.context, q.dtype)
    )
    queries = q[chunk.start : chunk.end].view(rows, kv_heads, shared, head_size).permute(1, 2, 0, 3)
    sinks = None if attention.sinks is None else attention.sinks.view(kv_heads, shared, 1, 1)
    attended = _weigh(queries, keys, values, chunk.mask, attention, sinks, causal=chunk.mask is None)
    out[chunk.start : chunk.end] = attended.permute(2, 0, 1, 3).reshape(rows, -1, head_size)


def _weigh(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    attention: Attention,
    sinks: Tensor | None,
    *,
    causal: bool = False,
) -> Tensor:
    """Softmax-weighted values: queries [.., Q, D] over keys and values [.., C, D], with `sinks` [.., Q or 1, 1].

    Written out, if it has to be, it is in float32.
    """
    if not _is_written_out(attention):
        return scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=causal, scale=attention.scale
        )
    scores = queries.float() @ keys.float().transpose(-1, -2) * attention.scale
    if attention.soft_cap is not None:
        scores = attention.soft_cap * torch.tanh(scores / attention.soft_cap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(queries.dtype)
