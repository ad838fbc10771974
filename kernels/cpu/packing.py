"""Weights in the tiles that the library multiplies with: packed from arrays and GGUF blocks, read back by the row."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.buffers import ALIGNMENT_BYTES, aligned_bytes, pointer
from kernels.cpu.library import Library, Team

TILE_OUTPUTS = 32
INTERLEAVED_ROWS = TILE_OUTPUTS // 2
"""Gate and up alternate in runs of so many rows, so that each tile holds both sides of the same outputs."""
PACKING_VERSION = 1
"""Rises whenever packed bytes change their meaning: part of a cache file's key."""


class Format(IntEnum):
    """How packed weights are stored; `src/weights.h` draws them."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    INT8_G32 = 3
    U4_G32 = 4

    @property
    def scale_inputs(self) -> int:
        """Inputs that share one scale of the quantised activations; 0 where activations aren't quantised."""
        return {Format.INT8: 64, Format.INT8_G32: 32, Format.U4_G32: 32}.get(self, 0)


class Source(IntEnum):
    """What rows of weights are made of before packing."""

    F32 = 0
    BF16 = 1
    F16 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q4_K = 6


_BLOCKS = {  # weights and bytes of one block
    Source.F32: (1, 4),
    Source.BF16: (1, 2),
    Source.F16: (1, 2),
    Source.Q8_0: (32, 34),
    Source.Q4_0: (32, 18),
    Source.Q4_1: (32, 20),
    Source.Q4_K: (256, 144),
}
_ROW = np.dtype([("at", np.uint64), ("source", np.int32), ("reserved", np.int32)])


class WeightsStruct(ctypes.Structure):
    """`headrace::Weights`: 32 bytes."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("bytes", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Packed:
    """A packed matrix [outputs, inputs]; `bytes` is [packed_bytes(...)] uint8, 64-byte aligned, and may be mapped."""

    format: Format
    outputs: int
    inputs: int
    bytes: NDArray[np.uint8]

    def __post_init__(self) -> None:
        if self.bytes.ctypes.data % ALIGNMENT_BYTES:
            raise ValueError(f"packed weights must begin at a multiple of {ALIGNMENT_BYTES} bytes")

    def struct(self) -> WeightsStruct:
        """What C is given; it is valid as long as `bytes` lives."""
        return WeightsStruct(self.format, 0, self.outputs, self.inputs, self.bytes.ctypes.data)


@dataclass(frozen=True)
class Matrix:
    """Rows of weights [outputs, inputs] as a file has them: `data` is [outputs, ...] and C-contiguous."""

    source: Source
    data: NDArray[Any]
    inputs: int

    def __post_init__(self) -> None:
        weights, size_bytes = _BLOCKS[self.source]
        expected = -(-self.inputs // weights) * size_bytes
        row_bytes = self.data.nbytes // max(1, len(self.data))
        if self.inputs % weights:
            raise ValueError(
                f"{self.source.name} comes in blocks of {weights} weights, and {self.inputs} isn't a multiple"
            )
        if row_bytes != expected:
            raise ValueError(
                f"a row of {self.inputs} weights in {self.source.name} takes {expected} bytes, not {row_bytes}"
            )

    @property
    def outputs(self) -> int:
        return len(self.data)

    def rows(self) -> NDArray[np.void]:
        """[outputs] of `headrace::Row`; valid as long as `data` lives."""
        rows = np.zeros(self.outputs, _ROW)
        stride = self.data.nbytes // max(1, self.outputs)
        rows["at"] = np.uint64(pointer(self.data).value or 0) + np.uint64(stride) * np.arange(
            self.outputs, dtype=np.uint64
        )
        rows["source"] = self.source
        return rows


def packed_bytes(library: Library, form: Format, outputs: int, inputs: int) -> int:
    """How many bytes a matrix takes once packed."""
    weights = WeightsStruct(form, 0, outputs, inputs, None)
    return int(library.cdll.headrace_packed_bytes(ctypes.byref(weights)))


def _interleaved(gate: NDArray[np.void], up: NDArray[np.void]) -> NDArray[np.void]:
    """Runs of 16 rows of each in turn; where they end within a run, rows of zeros."""
    runs = -(-len(gate) // INTERLEAVED_ROWS)
    both = np.zeros((2, runs * INTERLEAVED_ROWS), _ROW)
    both[0, : len(gate)], both[1, : len(up)] = gate, up
    return both.reshape(2, runs, INTERLEAVED_ROWS).swapaxes(0, 1).reshape(-1)


def pack(
    team: Team,
    form: Format,
    matrices: Sequence[Matrix],
    *,
    interleaved: bool = False,
    into: NDArray[np.uint8] | None = None,
) -> Packed:
    """Pack matrices of the same inputs behind one another, or two (gate, up) interleaved for silu(gate) * up.

    `into` is where to write: exactly `packed_bytes` aligned bytes, of an arena or of a mapped file.
    """
    inputs = matrices[0].inputs
    if any(one.inputs != other.inputs for one, other in pairwise(matrices)):
        raise ValueError(f"matrices to be packed together differ in their inputs: {[m.inputs for m in matrices]}")
    if form is Format.BF16 and inputs % 2:
        raise ValueError(f"bf16 products run over pairs of inputs: {inputs} is odd")
    if interleaved:
        gate, up = matrices
        if gate.outputs != up.outputs:
            raise ValueError(f"gate has {gate.outputs} rows and up {up.outputs}")
        rows = _interleaved(gate.rows(), up.rows())
    else:
        rows = np.concatenate([matrix.rows() for matrix in matrices])
    size = packed_bytes(team.library, form, len(rows), inputs)
    to = aligned_bytes(size) if into is None else into
    if to.nbytes != size:
        raise ValueError(f"the packed weights take {size} bytes, and there is room for {to.nbytes}")
    packed = Packed(form, len(rows), inputs, to)
    team.library.cdll.headrace_pack(team.handle, ctypes.byref(packed.struct()), pointer(rows), pointer(to))
    return packed


def unpack_row(library: Library, packed: Packed, output: int) -> NDArray[np.float32]:
    """Row `output` as [inputs] floats: what an embedding tied to the head reads."""
    if not 0 <= output < packed.outputs:
        raise IndexError(f"there is no row {output}: the matrix has {packed.outputs}")
    row = np.empty(packed.inputs, np.float32)
    library.cdll.headrace_unpack_row(ctypes.byref(packed.struct()), ctypes.c_int64(output), pointer(row))
    return row
