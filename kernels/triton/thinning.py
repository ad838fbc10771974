"""Thinning of a context in pages as the Triton kernels have them, by torch's own operations on the device.

It happens once in many steps, and reads a request's keys and values once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.kv import KVLayout, Thinning
from kernels.quantised import SCALE_BYTES, restore
from kernels.thinning import chosen, pick, slots_of
from kernels.triton.kv import LayerKV, page_offsets


def thin(kv: Sequence[LayerKV], layout: KVLayout, work: Thinning) -> None:
    """Thin one request's context in all layers."""
    slots = slots_of(work, layout, kv[0].keys.device)
    pages = page_offsets(slots // layout.page_size, layout, unit_bytes=1).long()
    heads = torch.arange(layout.kv_heads, device=slots.device)
    lines = heads * layout.page_size + (slots % layout.page_size)[:, None]
    rows = pages[:, None] // layout.element_bytes + lines * layout.head_size
    scales = pages[:, None] // SCALE_BYTES + lines if layout.scale_bytes else None
    for layer in kv:
        _thin(layer, rows, scales, work)


def _thin(layer: LayerKV, rows: Tensor, scales: Tensor | None, work: Thinning) -> None:
    """`rows` [n, G]: where each token's heads begin among the keys and among the values; `scales` likewise."""
    size = layer.layout.head_size
    keys, values = (_from_everywhere(numbers, size) for numbers in (layer.keys, layer.values))
    found = keys[rows]
    found = keys[rows].view(layer.keys.dtype)
    tokens = chosen(found if scales is None else restore(found, layer.key_scales[scales]), work)
    _move(keys, rows, tokens)
    _move(values, rows, tokens)
    if scales is not None:
        _move(layer.key_scales, scales, tokens)
        _move(layer.value_scales, scales, tokens)


def _move(pool: Tensor, places: Tensor, tokens: Tensor) -> None:
    """Put what stands at the places of `tokens` [kept, G] at the first of the `places` [n, G]."""
    pool[places[: len(tokens)].flatten()] = pick(pool[places], tokens).flatten(0, 1)


def _from_everywhere(numbers: Tensor, size: int) -> Tensor:
    """Row i is the `size` numbers from i on, as bytes if they have one: rows overlap."""
    if numbers.dtype.itemsize == 1:
        numbers = numbers.view(torch.int8)
    return numbers.as_strided((len(numbers) - size + 1, size), (1, 1))
