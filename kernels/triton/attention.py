"""Paged attention on a GPU: which kernels serve a step, and with what blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.protocol import Attention, AttentionMetadata
from kernels.triton import configs
from kernels.triton.configs import Architecture
from kernels.triton.device.attention import combine_kernel, decode_kernel, prefill_kernel
from kernels.triton.kv import LayerKV, Places

LOG2_E = math.log2(math.e)
PARTIAL_BYTES = 2**28
"""What decode's splits may leave for the second stage; splits grow past it."""
SPLITS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class _Variant:
    """One layer's attention in the kernels' units."""

    scale: float
    window: int
    soft_cap: float
    has_window: bool
    has_soft_cap: bool

    @classmethod
    def of(cls, attention: Attention) -> _Variant:
        cap = attention.soft_cap
        return cls(
            scale=attention.scale * LOG2_E if cap is None else attention.scale / cap,
            window=attention.window or 0,
            soft_cap=0.0 if cap is None else cap * LOG2_E,
            has_window=attention.window is not None,
            has_soft_cap=cap is not None,
        )


def paged_attention(
    q: Tensor, kv: LayerKV, meta: AttentionMetadata, attention: Attention, architecture: Architecture
) -> Tensor:
    """Causal attention of q [T, H, D] over each request's pages -> [T, H, D].

    Requests with one row go through decode, the others through prefill; each kernel passes over those of the other,
    so that no length has to come to the host.
    """
    out = torch.empty_like(q)
    _decode(out, q, kv, meta, attention, architecture)
    if meta.max_query > 1:
        _prefill(out, q, kv, meta, attention, architecture)
    return out


def split_tokens(requests: int, heads: int, head_size: int, max_context: int) -> int:
    """Tokens of a decode program: `SPLIT_TOKENS` unless the partial results would take too much memory."""
    tokens = configs.SPLIT_TOKENS
    while 4 * requests * heads * head_size * -(-max_context // tokens) > PARTIAL_BYTES and tokens < max_context:
        tokens *= 2
    return tokens


def _decode(
    out: Tensor, q: Tensor, kv: LayerKV, meta: AttentionMetadata, attention: Attention, architecture: Architecture
) -> None:
    heads, size = q.shape[1:]
    requests, layout, variant = len(meta.context_len), kv.layout, _Variant.of(attention)
    places: Places = meta.plan
    tile = configs.decode(architecture, size, q.element_size())
    split = split_tokens(requests, heads, size, meta.max_context)
    splits = -(-meta.max_context // split)
    sums = torch.empty(requests, heads, splits, size, dtype=torch.float32, device=q.device)
    tops, totals = torch.empty(2, requests, heads, splits, dtype=torch.float32, device=q.device).unbind()
    block = triton.next_power_of_2(size)
    decode_kernel[requests, layout.kv_heads, splits](
        q, sums, tops, totals, kv.keys, kv.values, kv.key_scales, kv.value_scales, places.pages, meta.query_start,
        meta.context_len, variant.scale, variant.window, variant.soft_cap, places.pages.shape[1], splits,
        HEADS=heads, GROUP=heads // layout.kv_heads, D=size, BLOCK_D=block, PAGE=layout.page_size,
        BLOCK_M=max(tile.rows, triton.next_power_of_2(heads // layout.kv_heads)), BLOCK_N=tile.columns, SPLIT=split,
        UNIT=kv.unit, WINDOW=variant.has_window, SOFT_CAP=variant.has_soft_cap, SCALED=kv.is_scaled,
        PRECISION=configs.precision(architecture, q.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    combine_kernel[requests, heads](
        out, sums, tops, totals, _sinks(attention, tops), meta.query_start, meta.context_len, variant.window, splits,
        HEADS=heads, D=size, BLOCK_D=block, SPLIT=split, BLOCK_S=SPLITS_AT_ONCE, WINDOW=variant.has_window,
        SINKS=attention.sinks is not None, num_warps=4, num_stages=1,
    )  # fmt: skip


def _prefill(
    out: Tensor, q: Tensor, kv: LayerKV, meta: AttentionMetadata, attention: Attention, architecture: Architecture
) -> None:
    tokens, heads, size = q.shape
    requests, layout, variant = len(meta.context_len), kv.layout, _Variant.of(attention)
    places: Places = meta.plan
    tile = configs.prefill(architecture, size, q.element_size())
    group = heads // layout.kv_heads
    rows = max(tile.rows, triton.next_power_of_2(group))
    tiles = tokens // (rows // group) + requests
    prefill_kernel[tiles, layout.kv_heads](
        q, out, kv.keys, kv.values, kv.key_scales, kv.value_scales, _sinks(attention, q), places.pages,
        meta.query_start, meta.context_len, variant.scale, variant.window, variant.soft_cap, places.pages.shape[1],
        requests,
        HEADS=heads, GROUP=group, D=size, BLOCK_D=triton.next_power_of_2(size), PAGE=layout.page_size, BLOCK_M=rows,
        BLOCK_N=tile.columns, UNIT=kv.unit, WINDOW=variant.has_window, SOFT_CAP=variant.has_soft_cap,
        SINKS=attention.sinks is not None, SCALED=kv.is_scaled, PRECISION=configs.precision(architecture, q.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _sinks(attention: Attention, unread: Tensor) -> Tensor:
    return unread if attention.sinks is None else attention.sinks
