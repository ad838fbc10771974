"""What attention and the writing of keys and values take: the structs of `src/attention_types.h`, checked."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE_TOKENS = 16
"""Pages hold a multiple of this many tokens."""
MOST_HEAD_SIZE = 512

Array = NDArray[Any]


class Numbers(IntEnum):
    """What pages hold of keys and values: the type that is computed with, or a byte for each number, with scales."""

    PLAIN = 0
    INT8 = 1
    E4M3 = 2


NUMBERS = {"auto": Numbers.PLAIN, "int8": Numbers.INT8, "fp8": Numbers.E4M3}
"""By the names that settings have for them."""


class HeadShape(ctypes.Structure):
    _fields_ = (
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("page_tokens", ctypes.c_int32),
        ("window_tokens", ctypes.c_int32),
        ("is_float", ctypes.c_int32),
        ("numbers", ctypes.c_int32),
    )


class StepShape(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        ("requests", ctypes.c_int64),
        ("positions", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("context_len", ctypes.c_void_p),
        ("page_offset", ctypes.c_void_p),
        ("pages_per_request", ctypes.c_int64),
    )


class RotaryLayer(ctypes.Structure):
    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("qkv_stride", ctypes.c_int64),
        ("q_stride", ctypes.c_int64),
        ("norm_eps", ctypes.c_float),
        ("qkv_is_float", ctypes.c_int32),
    )


class AttentionLayer(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("out_is_float", ctypes.c_int32),
    )


SIZES_BYTES = {HeadShape: 28, StepShape: 56, RotaryLayer: 80, AttentionLayer: 48}
"""As src/abi_layers.h asserts them."""
if any(ctypes.sizeof(struct) != size for struct, size in SIZES_BYTES.items()):
    raise ImportError("the structs of kernels.cpu.layers differ from those of the C++ library")


@dataclass(frozen=True)
class Heads:
    """How the heads of every layer are arranged; attention computes with bf16 unless `is_float`."""

    heads: int
    kv_heads: int
    head_size: int
    page_tokens: int
    is_float: bool = False
    window_tokens: int | None = None
    """Tokens that a row sees, itself included; None for its whole context."""
    numbers: Numbers = Numbers.PLAIN
    """Of keys and values in pages."""

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads can't share {self.kv_heads} key heads equally")
        if self.head_size < 2 or self.head_size % 2 or self.head_size > MOST_HEAD_SIZE:
            raise ValueError(f"a head size is an even number up to {MOST_HEAD_SIZE}, not {self.head_size}")
        if self.page_tokens < 1 or self.page_tokens % PAGE_TOKENS:
            raise ValueError(f"a page holds a multiple of {PAGE_TOKENS} tokens here, not {self.page_tokens}")
        if self.window_tokens is not None and self.window_tokens < 1:
            raise ValueError(f"a window has one token at least, not {self.window_tokens}")

    @property
    def element(self) -> type[np.generic]:
        """Of queries, and of keys and values without scales; bf16 as the uint16 of its bits."""
        return np.float32 if self.is_float else np.uint16

    @property
    def number_bytes(self) -> int:
        """Of one component of a key or a value in its page."""
        return np.dtype(self.element).itemsize if self.numbers is Numbers.PLAIN else 1

    @property
    def scale_bytes(self) -> int:
        """Beside each token's key and value of one head."""
        return 0 if self.numbers is Numbers.PLAIN else 4

    @property
    def layer_bytes(self) -> int:
        """Keys and values of one page in one layer."""
        return 2 * self.kv_heads * self.page_tokens * (self.head_size * self.number_bytes + self.scale_bytes)

    @cached_property
    def struct(self) -> HeadShape:
        return HeadShape(
            self.heads,
            self.kv_heads,
            self.head_size,
            self.page_tokens,
            self.window_tokens or 0,
            self.is_float,
            self.numbers,
        )


@dataclass(frozen=True)
class Step:
    """Where the T rows of one step stand; request r owns the rows `query_start[r] : query_start[r + 1]`."""

    positions: NDArray[np.int32]
    """[T] in the sequence."""
    query_start: NDArray[np.int32]
    """[R + 1]"""
    context_len: NDArray[np.int32]
    """[R] tokens of each request up to and with its last row."""
    page_offset: NDArray[np.int64]
    """[R, most pages of a request] bytes from the arena's start to each page of a request's context."""

    def __post_init__(self) -> None:
        expect(self.positions, np.int32, (self.rows,), "positions")
        expect(self.query_start, np.int32, (self.requests + 1,), "query_start")
        expect(self.context_len, np.int32, (self.requests,), "context_len")
        expect(self.page_offset, np.int64, (self.requests, self.page_offset.shape[-1]), "page_offset")
        rows = np.diff(self.query_start)
        if self.query_start[0] != 0 or self.query_start[-1] != self.rows or (rows < 0).any():
            raise ValueError(f"query_start {self.query_start} doesn't divide {self.rows} rows")
        first = np.repeat(self.context_len - rows - self.query_start[:-1], rows)
        if not np.array_equal(self.positions, first + np.arange(self.rows)) or (self.positions < 0).any():
            raise ValueError("the rows of a request are not the last tokens of its context")

    @property
    def rows(self) -> int:
        return len(self.positions)

    @property
    def requests(self) -> int:
        return len(self.context_len)

    @cached_property
    def struct(self) -> StepShape:
        return StepShape(
            self.rows,
            self.requests,
            address(self.positions),
            address(self.query_start),
            address(self.context_len),
            address(self.page_offset),
            self.page_offset.shape[1],
        )

    def check_pages(self, heads: Heads, pages_bytes: int) -> None:
        """Raise ValueError unless each token of each context has its place in the first `pages_bytes` of the arena."""
        pages = -(-self.context_len // heads.page_tokens)
        width = self.page_offset.shape[1]
        if (pages > width).any():
            raise ValueError(f"a context of {self.context_len.max()} tokens needs more than the {width} pages listed")
        used = self.page_offset[np.arange(width) < pages[:, None]]
        if used.size and (used.min() < 0 or used.max() + heads.layer_bytes > pages_bytes):
            raise ValueError(f"a page lies outside the arena's {pages_bytes} bytes")


def expect(array: Array, dtype: type[np.generic], shape: tuple[int, ...], name: str) -> None:
    """Raise unless `array` is C-contiguous and has this type and shape."""
    if array.dtype != dtype:
        raise TypeError(f"{name} has to be {np.dtype(dtype)}, not {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name} has to have the shape {shape}, not {array.shape}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} has to be C-contiguous")


def address(array: Array | None) -> int | None:
    """Where an array's first element lies; None for none."""
    return None if array is None else array.ctypes.data
