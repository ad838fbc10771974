"""Long contexts thinned in place by a team's threads: `src/thin.h`."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.layers import Heads, address, expect
from kernels.cpu.library import Team
from kernels.kv import KVLayout, Thinning


class ThinWork(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_int64),
        ("layer_bytes", ctypes.c_int64),
        ("page_offset", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("kept", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
    )


if ctypes.sizeof(ThinWork) != 56:  # as src/abi_layers.h asserts it
    raise ImportError("the struct of kernels.cpu.thinning differs from that of the C++ library")


def thin(team: Team, heads: Heads, layout: KVLayout, arena: NDArray[np.uint8], work: Thinning) -> None:
    """Let each head of all layers keep what `work` says of a context in the arena's pages."""
    expect(arena, np.uint8, (arena.size,), "the arena")
    needed = -(-work.tokens // layout.page_size)
    offsets: NDArray[np.int64] = np.array([layout.offset_bytes(page) for page in work.pages[:needed]], np.int64)
    if len(offsets) < needed:
        raise ValueError(f"{work.tokens} tokens don't lie on {len(offsets)} pages")
    if needed and not 0 <= offsets.min() <= offsets.max() <= arena.size - layout.page_bytes:
        raise ValueError(f"a page lies outside the arena's {arena.size} bytes")
    struct = ThinWork(
        layout.layers, layout.layer_bytes, address(offsets), work.tokens, work.kept, work.first, work.last
    )
    team.library.cdll.headrace_thin(
        team.handle, ctypes.byref(heads.struct), ctypes.byref(struct), ctypes.c_void_p(arena.ctypes.data)
    )
