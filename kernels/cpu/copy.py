"""Whole pages, copied by a team's threads: within the arena, to host memory, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.layers import address, expect
from kernels.cpu.library import Team

Bytes = NDArray[np.uint8]


def copy_pages(team: Team, arena: Bytes, page_bytes: int, source: Sequence[int], target: Sequence[int]) -> None:
    """Copy the pages at the offsets `source` of the arena onto those at `target`; no target is a source as well."""
    if set(source) & set(target) or len(set(target)) < len(target):
        raise ValueError("pages are copied at once: none may be written twice, or read and written")
    _move(team, page_bytes, _pages(arena, page_bytes, source), _pages(arena, page_bytes, target))


def save_pages(team: Team, arena: Bytes, page_bytes: int, source: Sequence[int], saved: Bytes) -> None:
    """Copy the pages at the offsets `source` of the arena into `saved` [n, page_bytes]."""
    expect(saved, np.uint8, (len(source), page_bytes), "saved")
    _move(team, page_bytes, _pages(arena, page_bytes, source), _rows(saved))


def load_pages(team: Team, saved: Bytes, arena: Bytes, page_bytes: int, target: Sequence[int]) -> None:
    """Copy `saved` [n, page_bytes] onto the pages at the offsets `target` of the arena."""
    expect(saved, np.uint8, (len(target), page_bytes), "saved")
    if len(set(target)) < len(target):
        raise ValueError("no page may be written twice")
    _move(team, page_bytes, _rows(saved), _pages(arena, page_bytes, target))


def _pages(arena: Bytes, page_bytes: int, offsets: Sequence[int]) -> NDArray[np.int64]:
    """Addresses of the pages at these offsets of the arena."""
    expect(arena, np.uint8, (arena.size,), "the arena")
    places: NDArray[np.int64] = np.array(offsets, np.int64)
    if places.size and not 0 <= places.min() <= places.max() <= arena.size - page_bytes:
        raise ValueError(f"a page lies outside the arena's {arena.size} bytes")
    places += arena.ctypes.data
    return places


def _rows(saved: Bytes) -> NDArray[np.int64]:
    rows: NDArray[np.int64] = np.arange(len(saved), dtype=np.int64) * saved.shape[1]
    return rows + np.int64(saved.ctypes.data)


def _move(team: Team, page_bytes: int, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
    moves = np.stack([target, source], axis=1)
    team.library.cdll.headrace_copy_pages(
        team.handle, ctypes.c_void_p(address(moves)), ctypes.c_int64(len(moves)), ctypes.c_int64(page_bytes)
    )
