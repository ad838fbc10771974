"""Low-rank adapters in the library's form (`src/lora_types.h`), and the operation alone."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.buffers import pointer
from kernels.cpu.convert import float_to_bf16
from kernels.cpu.layers import expect
from kernels.cpu.library import Library, Team
from kernels.cpu.packing import INTERLEAVED_ROWS, TILE_OUTPUTS

SHRUNK = 8
"""Numbers that a row is shrunk to at a time."""

Floats = NDArray[np.float32]


class AdaptersStruct(ctypes.Structure):
    _fields_ = (
        ("shrink", ctypes.c_void_p),
        ("expand", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("low", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class PackedAdapters:
    """What A adapters add to a packed matrix of joined parts; float32, or bf16 as uint16."""

    shrink: NDArray[Any]
    """[A, low, in]: a row's numbers for each part one behind the other, up to a multiple of `SHRUNK`"""
    expand: NDArray[Any]
    """[A, tiles, low, 32]"""
    spans: NDArray[np.int32]
    """[tiles, 2] of the `low` numbers those that a tile's outputs take"""

    @property
    def count(self) -> int:
        return len(self.shrink)

    @property
    def low(self) -> int:
        return int(self.shrink.shape[1])

    @property
    def inputs(self) -> int:
        return int(self.shrink.shape[2])

    def struct(self) -> AdaptersStruct:
        arrays = (self.shrink, self.expand, self.spans)
        return AdaptersStruct(*(pointer(array) for array in arrays), self.low)


def pack_adapters(
    library: Library,
    shrink: Floats,
    expand: Floats,
    widths: Sequence[int],
    *,
    is_float: bool,
    interleaved: bool = False,
) -> PackedAdapters:
    """Adapters [A, P, rank, in] and [A, out, rank] of parts with so many outputs each, as their weights are packed."""
    count, parts, rank, inputs = shrink.shape
    numbers = -(-parts * rank // SHRUNK) * SHRUNK
    wide = np.zeros((count, numbers, inputs), np.float32)
    wide[:, : parts * rank] = shrink.reshape(count, parts * rank, inputs)
    part_of = np.repeat(np.arange(parts), widths)
    rows = _packed_order(widths) if interleaved else np.arange(sum(widths))
    order = np.full(-(-len(rows) // TILE_OUTPUTS) * TILE_OUTPUTS, -1)
    order[: len(rows)] = rows
    blocks = np.zeros((count, len(order), numbers), np.float32)
    for part, (first, end) in enumerate(pairwise([0, *accumulate(widths)])):
        mine = (order >= first) & (order < end)
        blocks[:, mine, part * rank : (part + 1) * rank] = expand[:, order[mine]]
    tiled = np.ascontiguousarray(blocks.reshape(count, -1, TILE_OUTPUTS, numbers).swapaxes(2, 3))
    arrays = [wide, tiled] if is_float else [float_to_bf16(library, array) for array in (wide, tiled)]
    return PackedAdapters(arrays[0], arrays[1], _spans(order, part_of, rank))


def _packed_order(widths: Sequence[int]) -> NDArray[np.int64]:
    """Rows of gate and up in the order in which they are packed, -1 where a run isn't full."""
    (width, _) = widths
    runs = -(-width // INTERLEAVED_ROWS)
    both = np.full((2, runs * INTERLEAVED_ROWS), -1)
    both[0, :width], both[1, :width] = np.arange(width), np.arange(width, 2 * width)
    return both.reshape(2, runs, INTERLEAVED_ROWS).swapaxes(0, 1).reshape(-1)


def _spans(order: NDArray[np.int64], part_of: NDArray[np.int64], rank: int) -> NDArray[np.int32]:
    """[tiles, 2]: the numbers of all parts that a tile has rows of, at even places."""
    spans = []
    for tile in order.reshape(-1, TILE_OUTPUTS):
        parts = part_of[tile[tile >= 0]]
        first, end = parts.min() * rank, (parts.max() + 1) * rank
        spans.append((first // 2 * 2, -(-end // 2) * 2))
    return np.array(spans, np.int32)


def add_adapters(
    team: Team, adapters: PackedAdapters, adapter: NDArray[np.int32], x: NDArray[Any], out: NDArray[Any]
) -> None:
    """Add to out [T, out] what the rows' adapters [T], counted from 1, 0 for none, make of x [T, in]."""
    rows, outputs = out.shape
    element = adapters.shrink.dtype.type
    expect(x, element, (rows, adapters.inputs), "x")
    expect(out, element, (rows, outputs), "out")
    expect(adapter, np.int32, (rows,), "the rows' adapters")
    if -(-outputs // TILE_OUTPUTS) != adapters.expand.shape[1]:
        raise ValueError(f"the adapters are of {adapters.expand.shape[1]} tiles of outputs, not of {outputs} outputs")
    if rows and not 0 <= adapter.min() <= adapter.max() <= adapters.count:
        raise ValueError(f"a row has an adapter that is none of the {adapters.count}")
    team.library.call(
        "add_adapters",
        team.handle,
        ctypes.byref(adapters.struct()),
        pointer(adapter),
        pointer(x),
        ctypes.c_int64(adapters.inputs),
        pointer(out),
        ctypes.c_int64(outputs),
        ctypes.c_int64(rows),
        ctypes.c_int32(element is np.float32),
    )
