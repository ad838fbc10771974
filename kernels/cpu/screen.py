"""The head in 8 bits, which spares greedy rows most of the head: `src/screen.h` says how."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.buffers import pointer
from kernels.cpu.library import Team
from kernels.cpu.packing import TILE_OUTPUTS, Format, Packed, WeightsStruct

EXACT_FORMATS = (Format.F32, Format.BF16)
"""Of the heads that a screen can stand before."""

Floats = NDArray[np.float32]


class ScreenStruct(ctypes.Structure):
    """`headrace::Screen`: 48 bytes; all zeros if there is none."""

    _fields_ = (("weights", WeightsStruct), ("errors", ctypes.c_void_p), ("norms", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class Screen:
    """A head in 8 bits, and how far its logits can be from the exact ones."""

    weights: Packed
    """[vocabulary, hidden], `Format.INT8`."""
    errors: Floats
    """[bounds_of(vocabulary)] of each output what its logit can be off by, for one unit of the inputs' norm."""
    norms: Floats
    """[bounds_of(vocabulary)] of each output what its logit can be off by, for one unit of the inputs' own error."""

    def struct(self) -> ScreenStruct:
        """What C is given; it is valid as long as the arrays live."""
        return ScreenStruct(self.weights.struct(), self.errors.ctypes.data, self.norms.ctypes.data)

    def check(self, head: Packed) -> None:
        """Raise ValueError unless this can stand before `head`."""
        shape = (self.weights.format, self.weights.outputs, self.weights.inputs)
        bounds = bounds_of(head.outputs)
        if head.format not in EXACT_FORMATS or shape != (Format.INT8, head.outputs, head.inputs):
            raise ValueError(
                f"a screen of {shape} doesn't fit a head of {head.outputs} x {head.inputs} in {head.format!r}"
            )
        if self.errors.shape != (bounds,) or self.norms.shape != (bounds,):
            raise ValueError(f"a screen of {head.outputs} outputs has {bounds} errors and norms")


def bounds_of(outputs: int) -> int:
    """How many errors, and how many norms, a screen of so many outputs has: those of whole tiles."""
    return -(-outputs // TILE_OUTPUTS) * TILE_OUTPUTS


def measure(team: Team, head: Packed, screen: Screen) -> None:
    """Fill the errors and norms of a screen that was packed of the same rows as `head`."""
    screen.check(head)
    team.library.cdll.headrace_measure_screen(
        team.handle,
        ctypes.byref(head.struct()),
        ctypes.byref(screen.weights.struct()),
        pointer(screen.errors),
        pointer(screen.norms),
    )
