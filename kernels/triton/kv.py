"""One layer's keys and values of all pages, as the kernels address them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.kv import KVLayout
from kernels.protocol import AttentionMetadata
from kernels.quantised import SCALE_BYTES, scale_bytes


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
    def unit(self) -> int:
        """Elements that `Places` counts in."""
        return unit_of(self.layout.page_bytes // self.layout.element_bytes)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a step's pages and tokens lie, computed once for all layers; offsets count in `LayerKV.unit` elements."""

    pages: Tensor
    """[R, most pages of a request] int32."""
    pages_of_tokens: Tensor
    """[T] int32: where the page of each new token begins."""
    lines: Tensor
    """[T] int32: each new token's place in its page."""


def kv_views(storage: Tensor, layout: KVLayout, dtype: torch.dtype) -> list[LayerKV]:
    """Each layer of `storage` [bytes] uint8, whose keys and values have the type `dtype`."""
    if dtype.itemsize != layout.element_bytes:
        raise ValueError(
            f"the KV layout holds {layout.element_bytes} bytes for each element, {dtype} has {dtype.itemsize}"
        )
    if layout.scale_bytes != scale_bytes(dtype):
        raise ValueError(f"a KV of {dtype} needs {scale_bytes(dtype)} bytes of scale for each head")
    if len(storage) >= 2**31 * unit_of(layout.page_bytes // layout.element_bytes) * layout.element_bytes:
        raise ValueError(
            f"{len(storage)} bytes of KV are more than 32 bits can address by the page size {layout.page_size}"
        )
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
    unit_bytes = unit_of(layout.page_bytes // layout.element_bytes) * layout.element_bytes
    return Places(
        pages=page_offsets(meta.block_table, layout, unit_bytes),
        pages_of_tokens=page_offsets(meta.slots // layout.page_size, layout, unit_bytes),
        lines=meta.slots % layout.page_size,
    )


def unit_of(page: int) -> int:
    """The greatest power of two, up to 128, that divides a page of so many elements or words.

    Offsets in it fit into 32 bits, and the compiler knows that what they lead to is aligned.
    """
    return min(128, page & -page)


def page_offsets(pages: Tensor, layout: KVLayout, unit_bytes: int) -> Tensor:
    """`KVLayout.offset_bytes` of many pages in units of so many bytes, int32."""
    extents = pages // layout.pages_per_extent
    gap_units = (layout.extent_bytes - layout.pages_per_extent * layout.page_bytes) // unit_bytes
    return (extents * gap_units + pages * (layout.page_bytes // unit_bytes)).to(torch.int32)
