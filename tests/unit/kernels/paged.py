"""Pages filled by hand in the layout of `kernels/cpu/src/attention_types.h`, independent of the library."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.layers import Heads, Step

Array = NDArray[Any]


def to_bf16(numbers: Array) -> NDArray[np.uint16]:
    """The nearest bf16's bits, ties to even; no NaN."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def stored(numbers: Array, heads: Heads) -> Array:
    return np.ascontiguousarray(numbers, np.float32) if heads.is_float else to_bf16(numbers)


def loaded(array: Array) -> Array:
    return array if array.dtype == np.float32 else from_bf16(array)


@dataclass
class Pages:
    """An arena whose pages are handed out in a random order, with a gap between them and garbage in all of them."""

    heads: Heads
    count: int
    layers: int = 2
    seed: int = 0
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.page_bytes = self.layers * self.heads.layer_bytes + 64
        self.arena = self.random.integers(0, 256, self.count * self.page_bytes, np.uint8)
        self.free = [int(page) for page in self.random.permutation(self.count)]

    def take(self, tokens: int) -> list[int]:
        """Byte offsets of enough new pages for so many tokens."""
        return [self.free.pop() * self.page_bytes for _ in range(-(-tokens // self.heads.page_tokens))]

    def blocks(self, offset: int, layer: int) -> tuple[Array, Array]:
        """Views of one page's keys [G, D / n, B, n] and values [G, B / n, D, n], n elements to a word."""
        h = self.heads
        start = offset + layer * h.layer_bytes
        block = self.arena[start : start + h.layer_bytes].view(h.element)
        n = 1 if h.is_float else 2
        keys, values = block.reshape(2, -1)
        return (
            keys.reshape(h.kv_heads, h.head_size // n, h.page_tokens, n),
            values.reshape(h.kv_heads, h.page_tokens // n, h.head_size, n),
        )

    def write(self, offsets: list[int], layer: int, keys: Array, values: Array, first: int = 0) -> None:
        """Keys and values [tokens, G, D], in the stored type, from token `first` of the pages on."""
        n = 1 if self.heads.is_float else 2
        for token, (key, value) in enumerate(zip(keys, values, strict=True), first):
            page, at = divmod(token, self.heads.page_tokens)
            key_block, value_block = self.blocks(offsets[page], layer)
            key_block[:, :, at] = key.reshape(self.heads.kv_heads, -1, n)
            value_block[:, at // n, :, at % n] = value

    def read(self, offsets: list[int], layer: int, first: int, end: int) -> tuple[Array, Array]:
        """Keys and values [end - first, G, D]."""
        n = 1 if self.heads.is_float else 2
        keys, values = [], []
        for token in range(first, end):
            page, at = divmod(token, self.heads.page_tokens)
            key_block, value_block = self.blocks(offsets[page], layer)
            keys.append(key_block[:, :, at].reshape(self.heads.kv_heads, -1))
            values.append(value_block[:, at // n, :, at % n])
        return np.array(keys), np.array(values)


def make_step(chunks: list[tuple[int, int]], tables: list[list[int]]) -> Step:
    """Requests that have computed `chunk[0]` tokens and take `chunk[1]` more, with their pages."""
    width = max(map(len, tables))
    return Step(
        positions=np.concatenate([np.arange(done, done + rows, dtype=np.int32) for done, rows in chunks]),
        query_start=np.cumsum([0] + [rows for _, rows in chunks], dtype=np.int32),
        context_len=np.array([done + rows for done, rows in chunks], np.int32),
        page_offset=np.array([table + [0] * (width - len(table)) for table in tables], np.int64),
    )
