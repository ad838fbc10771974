"""A model's tensors under one set of names, as their file holds them. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import gguf
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in the form of its file. Read only: it may be a view of the file."""

    kind: str
    """`F32`, `F16`, `BF16`, or a block type of GGUF, as the `gguf` package names it: `Q4_1`."""
    shape: tuple[int, ...]
    """Rows first, in elements."""
    data: NDArray[Any]
    """float32, float16 or uint16 (bfloat16) of `shape`; of a block type uint8 [rows, bytes of a row]."""

    def float32(self) -> NDArray[np.float32]:
        """Its values in `shape`, never a view of the file."""
        if self.kind == "BF16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        if self.kind in ("F32", "F16"):
            return self.data.astype(np.float32)
        values: NDArray[np.float32] = gguf.dequantize(self.data, gguf.GGMLQuantizationType[self.kind])
        return values.reshape(self.shape)

    @property
    def is_plain(self) -> bool:
        """Whether it holds elements, and not blocks."""
        return self.kind in ("F32", "F16", "BF16")

    def first_rows(self, count: int) -> StoredTensor:
        """The first rows of a matrix."""
        return self.some_rows(slice(count))

    def some_rows(self, rows: slice) -> StoredTensor:
        """A run of the rows; blocks lie within rows."""
        data = self.data[rows]
        return StoredTensor(self.kind, (len(data), *self.shape[1:]), data)

    def some_columns(self, columns: slice) -> StoredTensor:
        """A run of a matrix's columns; of blocks as float32 where the cut goes through one."""
        if not self.is_plain:
            block, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.kind]]
            first, end, _ = columns.indices(self.shape[1])
            if first % block or end % block:
                return StoredTensor("F32", self.shape, self.float32()).some_columns(columns)
            data = self.data[:, first // block * size_bytes : end // block * size_bytes]
            return StoredTensor(self.kind, (self.shape[0], end - first), data)
        data = self.data[:, columns]
        return StoredTensor(self.kind, (self.shape[0], data.shape[1]), data)

    def transposed(self) -> StoredTensor:
        """Columns as rows; of elements only."""
        if not self.is_plain:
            raise ValueError(f"blocks of {self.kind} lie within rows, which can't become columns")
        return StoredTensor(self.kind, self.shape[::-1], self.data.T)

    def unpermuted(self, heads: int) -> StoredTensor:
        """Undo what llama.cpp's converter does to the rows of q and k: pairs of one rotation beside each other, where
        halves of a head should be. Blocks lie within rows, so they move as they are."""
        rows = self.data.reshape(heads, -1, 2, *self.data.shape[1:]).swapaxes(1, 2)
        return StoredTensor(self.kind, self.shape, rows.reshape(self.data.shape))


class Weights(Protocol):
    """Tensors by canonical name, in the layout of Hugging Face: matrices [out, in], heads rotated by halves.

    `embedding`, `positions` (learned ones), `head`, `norm`, `rope_factors`, and for layer i `i.{attn,mlp}_norm`,
    `i.{attn,mlp}_post_norm`, `i.{q,k}_norm`, `i.{q,k,v,o,gate,up,down}`, and of mixtures `i.router` and
    `i.experts.<e>.{gate,up,down}`; a bias is the same with `.bias` behind it. What a model doesn't have isn't there.
    """

    def __contains__(self, name: object) -> bool: ...

    def __getitem__(self, name: str) -> StoredTensor:
        """It isn't kept: each call reads it again."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first, without reading it."""
        ...
