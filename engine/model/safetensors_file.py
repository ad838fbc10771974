"""One file of safetensors, mapped into memory. No torch here.

The `safetensors` package gives bfloat16 to torch only; the format itself is a length, a JSON header and the data.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from engine.model import strict_json
from engine.model.spec import UnsupportedModel
from engine.model.weights import StoredTensor

_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
MOST_HEADER_BYTES = 100_000_000
"""The limit that the format's own library has."""


class CorruptSafetensors(ValueError):
    """The file isn't one of safetensors that can be read."""


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: str
    shape: tuple[int, ...]
    start: int
    """Offset in the file, bytes."""
    end: int


class SafetensorsFile:
    """A file, mapped and parsed up to its tensors' data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise CorruptSafetensors(f"{path} is empty") from error
        try:
            self._entries = self._parse()
        except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptSafetensors(f"{path} is not a readable file of safetensors: {error}") from error

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def __getitem__(self, name: str) -> StoredTensor:
        entry = self._entries[name]
        if entry.kind not in _TYPES:
            raise UnsupportedModel(f"tensor {name} of {self.path} has the type {entry.kind}; read are {list(_TYPES)}")
        element = np.dtype(_TYPES[entry.kind])
        if prod(entry.shape) * element.itemsize != entry.end - entry.start:
            raise CorruptSafetensors(f"{self.path}: the data of tensor {name} doesn't fit its shape {entry.shape}")
        data = np.frombuffer(self._map, element, prod(entry.shape), entry.start)
        return StoredTensor(entry.kind, entry.shape, data.reshape(entry.shape))

    def _parse(self) -> dict[str, _Entry]:
        (length,) = struct.unpack_from("<Q", self._map)
        data = 8 + length
        if length > MOST_HEADER_BYTES or data > len(self._map):
            raise ValueError(f"its header of {length} bytes goes past its end")
        header: dict[str, Any] = strict_json.loads(self._map[8:data])
        entries = {}
        for name, fields in header.items():
            if name == "__metadata__":
                continue
            start, end = fields["data_offsets"]
            if not all(type(number) is int for number in (start, end, *fields["shape"])) or min((0, *fields["shape"])):
                raise ValueError(f"tensor {name} has no sizes in whole numbers")
            if not 0 <= start <= end <= len(self._map) - data:
                raise ValueError(f"it ends before the data of tensor {name}")
            entries[name] = _Entry(str(fields["dtype"]), tuple(fields["shape"]), data + start, data + end)
        return entries
