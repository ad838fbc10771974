"""A model's weights in the CPU library's own form: one block of memory, and where each array lies in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.memory.arena import Arena
from kernels.kv import UNIT_BYTES

ALIGNMENT_BYTES = 4096


class Place(NamedTuple):
    """Where one array lies in the block."""

    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Packed matrices, and float32 norms and biases, by name."""

    block: NDArray[np.uint8]
    places: Mapping[str, Place]

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def bytes(self, name: str) -> NDArray[np.uint8]:
        """A view of one array."""
        start, size_bytes = self.places[name]
        return self.block[start : start + size_bytes]

    def floats(self, name: str) -> NDArray[np.float32]:
        """A view of one array of float32."""
        return self.bytes(name).view(np.float32)


def lay_out(sizes_bytes: Mapping[str, int]) -> tuple[dict[str, Place], int]:
    """Places for arrays of these sizes, in their order, and the size of the block that holds them."""
    places, end = {}, 0
    for name, size_bytes in sizes_bytes.items():
        places[name] = Place(end, size_bytes)
        end += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return places, end


def new_block(size_bytes: int) -> NDArray[np.uint8]:
    """Zeroed memory in huge pages; it goes back to the system with its last view."""
    return Arena(max(1, -(-size_bytes // UNIT_BYTES))).bytes[:size_bytes]
