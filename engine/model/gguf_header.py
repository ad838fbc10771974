"""The header of a GGUF file: metadata and where its tensors lie. No torch here.

`gguf.GGUFReader` wraps every string of the vocabulary and the merges in numpy arrays, which takes
seconds; this reader takes milliseconds. The types and block sizes are the `gguf` package's.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.model.weights import StoredTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_NESTED = 8
"""No file has lists of lists this deep."""

_SCALARS = {
    gguf.GGUFValueType.UINT8: "B", gguf.GGUFValueType.INT8: "b", gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h", gguf.GGUFValueType.UINT32: "I", gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.UINT64: "Q", gguf.GGUFValueType.INT64: "q", gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.FLOAT64: "d", gguf.GGUFValueType.BOOL: "?",
}  # fmt: skip
_ELEMENTS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class CorruptGGUF(ValueError):
    """The file isn't a GGUF file that can be read."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies and how it is stored."""

    shape: tuple[int, ...]
    """Rows first, as in torch; the file has it the other way round."""
    type: gguf.GGMLQuantizationType
    start: int
    """Offset in the file, bytes."""
    size_bytes: int


class GGUFHeader:
    """A GGUF file, mapped into memory and parsed up to its tensors' data."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise CorruptGGUF(f"{path} is empty") from error
        try:
            self._parse()
        except (struct.error, ValueError, OverflowError, KeyError) as error:
            raise CorruptGGUF(f"{path} is not a readable GGUF file: {error}") from error

    def stored(self, name: str) -> StoredTensor:
        """The tensor as a view of the file."""
        info = self.tensors[name]
        kind = info.type.name
        if kind in _ELEMENTS:
            data = np.frombuffer(self._map, _ELEMENTS[kind], prod(info.shape), info.start)
            return StoredTensor(kind, info.shape, data.reshape(info.shape))
        raw = np.frombuffer(self._map, np.uint8, info.size_bytes, info.start)
        return StoredTensor(kind, info.shape, raw.reshape(max(1, prod(info.shape[:-1])), -1))

    def _parse(self) -> None:
        if self._map[:4] != MAGIC:
            raise ValueError("it doesn't begin with 'GGUF'")
        cursor = _Cursor(self._map, 4)
        version = cursor.scalar("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} (of supported {VERSIONS}), or a big-endian file")
        tensor_count, entry_count = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata = {cursor.string(): cursor.value() for _ in range(entry_count)}
        entries = [(cursor.string(), *cursor.tensor()) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {str(alignment)[:40]}")
        data = -(-cursor.position // alignment) * alignment
        self.tensors = {name: self._tensor(name, shape, kind, data + at) for name, shape, kind, at in entries}

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorInfo:
        kind = gguf.GGMLQuantizationType(kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ValueError(f"tensor {name} of shape {shape} doesn't fit the blocks of {kind.name}")
        size = prod(shape) // block * block_bytes
        if start + size > len(self._map):
            raise ValueError(f"it ends before the data of tensor {name}")
        return TensorInfo(shape, kind, start, size)


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self.position = position

    def scalar(self, code: str) -> Any:
        (value,) = self._unpack("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        start, self.position = self.position, self.position + length
        if self.position > len(self._data):
            raise ValueError("it ends inside a string")
        return self._data[start : self.position].decode("utf-8", "surrogateescape")

    def value(self) -> Any:
        return self._value(gguf.GGUFValueType(self.scalar("I")))

    def tensor(self) -> tuple[tuple[int, ...], int, int]:
        """Shape (rows first), type and offset of a tensor."""
        shape = self._unpack(f"<{self.scalar('I')}Q")
        return tuple(reversed(shape)), self.scalar("I"), self.scalar("Q")

    def _value(self, kind: gguf.GGUFValueType, depth: int = 0) -> Any:
        if kind == gguf.GGUFValueType.STRING:
            return self.string()
        if kind != gguf.GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[kind])
        if depth > MOST_NESTED:
            raise ValueError(f"it has lists in lists, more than {MOST_NESTED} deep")
        kind, count = gguf.GGUFValueType(self.scalar("I")), self.scalar("Q")
        if kind in _SCALARS:
            return list(self._unpack(f"<{count}{_SCALARS[kind]}"))
        read: Callable[[], Any] = (
            self.string if kind == gguf.GGUFValueType.STRING else lambda: self._value(kind, depth + 1)
        )
        return [read() for _ in range(count)]

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._data, self.position)
        self.position += struct.calcsize(form)
        return values
