"""Memory as the library wants it: 64-byte aligned, and in huge pages where there is much of it."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT_BYTES = 64
HUGE_PAGE_BYTES = 2 * 2**20


def pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    """The address of a C-contiguous array's first element."""
    if not array.flags.c_contiguous:
        raise ValueError(f"the array of shape {array.shape} is not C-contiguous")
    return ctypes.c_void_p(array.ctypes.data)


def aligned_bytes(count: int) -> NDArray[np.uint8]:
    """`count` bytes of no particular value that begin at a multiple of 64."""
    room: NDArray[np.uint8] = np.empty(count + ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES
    return room[start : start + count]


def huge_bytes(count: int) -> NDArray[np.uint8]:
    """`count` zero bytes that begin at a huge page, and lie in such pages where the system grants them.

    Weights are read from end to end in every step: with pages of 4 KiB a third of the time goes to looking them up.
    """
    room = mmap.mmap(-1, count + HUGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    everything: NDArray[np.uint8] = np.frombuffer(room, np.uint8)
    start = -everything.ctypes.data % HUGE_PAGE_BYTES
    return everything[start : start + count]
