"""Block sizes, warps and pipeline stages for each architecture: a table, and no tuning at run time.

Chosen by what compiles without spills, with the matrix instructions of the architecture and within its shared
memory; the compile tests sweep every entry. Nothing here has been timed on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

Architecture = Literal["sm_80", "sm_90", "sm_100", "gfx942"]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
MULTIPROCESSORS_SHARED_BYTES: dict[Architecture, int] = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}
"""Shared memory that one program may take."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How one kernel is launched: rows and columns (or tokens) of its block."""

    rows: int
    columns: int
    warps: int
    stages: int


DECODE_ROWS = 16
"""Query heads of one key head in a decode block: the least that a matrix instruction takes."""
SPLIT_TOKENS = 256
"""Tokens of a context that one decode program attends to.

It depends on nothing in the batch, so that a row's sums have one order whatever its neighbours are.
"""


def decode(architecture: Architecture, head_size: int, element_bytes: int) -> Tile:
    """For decode attention; `element_bytes` is the activations' type."""
    wide = head_size > 128
    tile = Tile(DECODE_ROWS, 32 if wide or element_bytes == 4 else 64, 4, 2)
    if architecture == "gfx942":
        return replace(tile, columns=32, stages=1 if wide or element_bytes == 4 else 2)
    return tile


def prefill(architecture: Architecture, head_size: int, element_bytes: int) -> Tile:
    """For prefill attention."""
    if element_bytes == 4:
        return Tile(32, 16 if head_size > 128 else 32, 4, 1)
    wide = head_size > 128
    if architecture == "gfx942":
        return Tile(64, 32, 4, 1)
    if architecture == "sm_80":
        return Tile(64, 32, 8 if wide else 4, 2)
    return Tile(128, 32 if wide else 64, 8, 2)
