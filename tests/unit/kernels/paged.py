"""Pages filled by hand in the layout of `kernels/cpu/src/attention_types.h`, independent of the library."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cpu.layers import Heads, Numbers, Step
from kernels.quantised import quantise, restore

Array = NDArray[Any]

KINDS = {Numbers.INT8: torch.int8, Numbers.E4M3: torch.float8_e4m3fn}
"""What torch calls the numbers that have scales."""
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "float": {"is_float": True},
    "int8": {"numbers": Numbers.INT8},
    "e4m3": {"numbers": Numbers.E4M3},
    "float int8": {"is_float": True, "numbers": Numbers.INT8},
    "float e4m3": {"is_float": True, "numbers": Numbers.E4M3},
}
"""What heads compute with, and what their pages hold."""


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


def to_bytes(numbers: Array, kind: Numbers) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Numbers [..., D] as bytes, and their scales [...]: as torch's reference has them."""
    found, scales = quantise(torch.from_numpy(np.ascontiguousarray(numbers, np.float32)), KINDS[kind])
    return found.view(torch.uint8).numpy(), scales.numpy()


def from_bytes(found: NDArray[np.uint8], scales: NDArray[np.float32], kind: Numbers) -> NDArray[np.float32]:
    numbers = torch.from_numpy(np.ascontiguousarray(found)).view(KINDS[kind])
    return restore(numbers, torch.from_numpy(np.ascontiguousarray(scales))).numpy()


class Blocks(NamedTuple):
    """Views of one page in one layer, n numbers to a word."""

    keys: Array
    """[G, D / n, B, n]"""
    values: Array
    """[G, B / n, D, n]"""
    key_scales: Array
    """[G, B], of numbers that have scales"""
    value_scales: Array


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
        self.scaled = self.heads.numbers is not Numbers.PLAIN
        self.per_word = 1 if self.heads.is_float else 2

    def take(self, tokens: int) -> list[int]:
        """Byte offsets of enough new pages for so many tokens."""
        return [self.free.pop() * self.page_bytes for _ in range(-(-tokens // self.heads.page_tokens))]

    def blocks(self, offset: int, layer: int) -> Blocks:
        h, n = self.heads, self.per_word
        start = offset + layer * h.layer_bytes
        both = self.arena[start : start + h.layer_bytes].reshape(2, h.kv_heads, -1)
        numbers_bytes = h.head_size * h.page_tokens * h.number_bytes
        numbers = both[:, :, :numbers_bytes].view(np.uint8 if self.scaled else h.element)
        scales = both[:, :, numbers_bytes:].view(np.float32)
        return Blocks(
            numbers[0].reshape(h.kv_heads, h.head_size // n, h.page_tokens, n),
            numbers[1].reshape(h.kv_heads, h.page_tokens // n, h.head_size, n),
            scales[0],
            scales[1],
        )

    def write(self, offsets: list[int], layer: int, keys: Array, values: Array, first: int = 0) -> None:
        """Keys and values [tokens, G, D] from token `first` on: floats if they get scales, else as stored."""
        n = self.per_word
        if self.scaled:
            keys, key_scales = to_bytes(keys, self.heads.numbers)
            values, value_scales = to_bytes(values, self.heads.numbers)
        for i, (key, value) in enumerate(zip(keys, values, strict=True)):
            page, at = divmod(first + i, self.heads.page_tokens)
            blocks = self.blocks(offsets[page], layer)
            blocks.keys[:, :, at] = key.reshape(self.heads.kv_heads, -1, n)
            blocks.values[:, at // n, :, at % n] = value
            if self.scaled:
                blocks.key_scales[:, at], blocks.value_scales[:, at] = key_scales[i], value_scales[i]

    def read(self, offsets: list[int], layer: int, first: int, end: int) -> tuple[Array, Array]:
        """Keys and values [end - first, G, D], as `write` takes them."""
        n = self.per_word
        found = []
        for token in range(first, end):
            page, at = divmod(token, self.heads.page_tokens)
            blocks = self.blocks(offsets[page], layer)
            key = blocks.keys[:, :, at].reshape(self.heads.kv_heads, -1)
            value = blocks.values[:, at // n, :, at % n]
            if self.scaled:
                key = from_bytes(key, blocks.key_scales[:, at], self.heads.numbers)
                value = from_bytes(value, blocks.value_scales[:, at], self.heads.numbers)
            found.append((key, value))
        keys, values = zip(*found, strict=True)
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
