"""Block sizes, warps and pipeline stages for each architecture: a table, and no tuning at run time.

Chosen by what compiles without spills, with the matrix instructions of the architecture and within its shared
memory; the compile tests sweep every entry. Nothing here has been timed on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

Architecture = Literal["sm_80", "sm_90", "sm_100", "gfx942"]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
SHARED_BYTES: dict[Architecture, int] = {
    "sm_80": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}
"""Shared memory that one program may take. The row sm_80 serves 8.6, 8.9 and 12.x too, which have less than 8.0."""


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
    """For decode attention; `element_bytes` is the activations' type.

    The pipeline's first stages fetch page offsets: five stages are what keeps two blocks of keys and values coming.
    """
    wide = head_size > 128
    if architecture == "gfx942":
        return Tile(DECODE_ROWS, 32, 4, 1 if wide or element_bytes == 4 else 2)
    if element_bytes == 4:
        return Tile(DECODE_ROWS, 16, 8, 3) if wide else Tile(DECODE_ROWS, 32, 4, 3)
    return Tile(DECODE_ROWS, 32 if wide else 64, 4, 5)


def prefill(architecture: Architecture, head_size: int, element_bytes: int) -> Tile:
    """For prefill attention."""
    wide = head_size > 128
    if element_bytes == 4:
        return Tile(16, 16 if wide else 32, 8 if wide else 4, 1)
    if architecture == "gfx942":
        return Tile(64, 32, 4, 1)
    if architecture == "sm_80":
        return Tile(64, 32, 8 if wide else 4, 3 if wide else 5)
    if architecture == "sm_100" and head_size <= 64:
        return Tile(128, 32, 8, 5)
    return Tile(128, 32 if wide else 64, 8, 3 if wide else 5)


def linear(architecture: Architecture, rows: int, element_bytes: int, step_bytes: int) -> Tile:
    """For products of `rows` rows with quantised weights, of which a step takes so many bytes for each output."""
    if element_bytes == 4:
        return Tile(16, 32, 4, 2)
    if rows <= 16:
        warps = step_bytes // 16  # so that a thread loads 16 bytes of the weight at once
        return Tile(16, 64, warps, 2) if architecture == "gfx942" else Tile(16, 32, warps, 4)
    if rows <= 64 or architecture == "gfx942":
        return Tile(64, 64, 4, 2 if architecture == "gfx942" else 3)
    return Tile(128, 64, 8, 3)


def lora(architecture: Architecture) -> Tile:
    """For adapters: rows of a tile, and inputs or outputs that it takes at once."""
    return Tile(16, 64, 2, 2) if architecture == "gfx942" else Tile(16, 64, 4, 3)


def precision(architecture: Architecture, dtype: torch.dtype) -> str:
    """How matrix units multiply: float32 as float32, which the ten bits of tf32 aren't and three such products are.

    NVIDIA's have no other way, and without them the kernels would spill.
    """
    if dtype != torch.float32:
        return "tf32"
    return "ieee" if architecture == "gfx942" else "tf32x3"


ROTARY_HEADS = 32
"""Heads, of all tokens in a row, that a program of rotation handles."""
GATED_BLOCK = 2048
"""Columns of a row that a program of a gated activation handles."""
COPY_BLOCK = 4096
"""Words of 4 bytes that a program of a page copy handles."""


def warps_of_row(block: int) -> int:
    """Warps for a row of `block` float32 in registers: 16 numbers for each of 32 lanes, at most 16 warps."""
    return min(16, max(1, block // 512))
