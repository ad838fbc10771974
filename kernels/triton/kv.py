"""One layer's keys and values of all pages, as the kernels address them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.kv import KVLayout
from kernels.protocol import AttentionMetadata

SCALE_BYTES = 4
"""Of one token's key or value in one head, if they are quantised."""
QUANTISED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The greatest number of each type that needs scales."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The arena from the layer's block of page 0 on, in four views: a page adds the same offset to each.

    A block is keys [G, B, D], values [G, B, D], then, of quantised ones, float32 scales of the keys [G, B] and of
    the values [G, B].
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    """The keys themselves, unread, if there are no scales."""
    value_scales: Tensor
    layout: KVLayout

    @property
    def is_scaled(self) -> bool:
        return self.layout.scale_bytes > 0

    @property
    def alignment(self) -> int:
        """Elements, up to 16, that divide every page's offset and every head's size."""
        elements = self.layout.page_bytes // self.layout.element_bytes
        return next(n for n in (16, 8, 4, 2, 1) if elements % n == 0)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a step's pages and tokens lie, computed once for all layers, in elements of the KV type."""

    pages: Tensor
    """[R, most pages of a request] int64."""
    pages_of_tokens: Tensor
    """[T] int64: where the page of each new token begins."""
    lines: Tensor
    """[T] int32: each new token's place in its page."""


def kv_views(storage: Tensor, layout: KVLayout, dtype: torch.dtype) -> list[LayerKV]:
    """Each layer of `storage` [bytes] uint8, whose keys and values have the type `dtype`."""
    if dtype.itemsize != layout.element_bytes:
        raise ValueError(f"the KV layout holds {layout.element_bytes} bytes for each element, {dtype} has {dtype.itemsize}")
    if (dtype in QUANTISED) != (layout.scale_bytes == SCALE_BYTES):
        raise ValueError(f"a KV of {dtype} needs {SCALE_BYTES if dtype in QUANTISED else 0} bytes of scale for each head")
    half = layout.kv_heads * layout.page_size * layout.head_size * layout.element_bytes
    scales = layout.kv_heads * layout.page_size * layout.scale_bytes

    def layer(first: int) -> LayerKV:
        keys, values = storage[first:].view(dtype), storage[first + half :].view(dtype)
        if not scales:
            return LayerKV(keys, values, keys, values, layout)
        behind = storage[first + 2 * half :].view(torch.float32)
        return LayerKV(keys, values, behind, behind[scales // SCALE_BYTES :], layout)

    return [layer(index * layout.layer_bytes) for index in range(layout.layers)]


def places(meta: AttentionMetadata) -> Places:
    """Turn page numbers into offsets; no value comes back to the host."""
    layout = meta.layout
    return Places(
        pages=_offsets(meta.block_table, layout),
        pages_of_tokens=_offsets(meta.slots // layout.page_size, layout),
        lines=meta.slots % layout.page_size,
    )


def _offsets(pages: Tensor, layout: KVLayout) -> Tensor:
    extents = pages.long() // layout.pages_per_extent
    gap = layout.extent_bytes - layout.pages_per_extent * layout.page_bytes
    return (extents * gap + pages.long() * layout.page_bytes) // layout.element_bytes
