"""One address range of the host, whose memory comes and goes in units."""

from __future__ import annotations

import contextlib
import mmap
import sys

import numpy as np
from numpy.typing import NDArray

from kernels.kv import UNIT_BYTES

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE: the range may be larger than what the machine has free."""


class Arena:
    """`units` units of addresses. A unit takes memory from when it is first written until it is decommitted.

    The range begins at a multiple of a unit and asks for huge pages. New memory reads as zeros. Views of
    `bytes` keep the addresses valid after `close`, but without what they held.
    """

    def __init__(self, units: int) -> None:
        self.units = units
        size = units * UNIT_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            self._map = mmap.mmap(-1, size + UNIT_BYTES, flags=flags)
        except OSError as error:
            raise MemoryError(
                f"the system refuses {size // 2**20} MiB more: raise the limit of this process's memory (ulimit -v), "
                "or take smaller weights (quantization) or a smaller kv_cache_bytes"
            ) from error
        whole = np.frombuffer(self._map, np.uint8)
        self._begin = -whole.ctypes.data % UNIT_BYTES
        self.bytes: NDArray[np.uint8] = whole[self._begin : self._begin + size]
        self.address = whole.ctypes.data + self._begin
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE, self._begin, size)

    @classmethod
    def reserve(cls, units: int, most_units: int) -> Arena:
        """A range of `most_units` units to grow into, or of `units` if the system refuses so many addresses."""
        try:
            return cls(max(units, most_units))
        except (MemoryError, OverflowError):
            return cls(units)

    def decommit(self, first: int, count: int) -> None:
        """Give the memory of `count` units from unit `first` on back to the system; they read as zeros afterwards."""
        if not (first >= 0 and first + count <= self.units):
            raise ValueError(f"units {first} to {first + count} are outside the arena of {self.units}")
        if count:
            self._map.madvise(mmap.MADV_DONTNEED, self._begin + first * UNIT_BYTES, count * UNIT_BYTES)

    def close(self) -> None:
        """Give all memory back to the system."""
        self.decommit(0, self.units)
