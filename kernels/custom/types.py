"""The element types that kernels and torch share."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class ElementType:
    """A type of tensors' elements, and of numbers if it has a ctype."""

    c_name: str
    dtype: torch.dtype
    schema: str
    """As `torch.library` calls a number of it."""
    ctype: type[Any] | None

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize

    def holds(self, value: float) -> bool:
        """Whether a number of this type can have the value."""
        if self.ctype is None:
            return False
        if self.schema == "int":
            info = torch.iinfo(self.dtype)
            return isinstance(value, int) and info.min <= value <= info.max
        return self.schema == "bool" or not math.isfinite(value) or abs(value) <= torch.finfo(self.dtype).max


_TYPES = (
    (ElementType("float", torch.float32, "float", ctypes.c_float), ("float32",)),
    (ElementType("double", torch.float64, "float", ctypes.c_double), ("float64",)),
    (ElementType("__nv_bfloat16", torch.bfloat16, "float", None), ("nv_bfloat16", "bfloat16")),
    (ElementType("__half", torch.float16, "float", None), ("half", "float16")),
    (ElementType("int", torch.int32, "int", ctypes.c_int32), ("int32_t", "int32", "signed int")),
    (ElementType("long long", torch.int64, "int", ctypes.c_int64), ("int64_t", "int64", "long", "long long int")),
    (ElementType("short", torch.int16, "int", ctypes.c_int16), ("int16_t", "int16")),
    (ElementType("signed char", torch.int8, "int", ctypes.c_int8), ("int8_t", "int8", "char")),
    (ElementType("unsigned char", torch.uint8, "int", ctypes.c_uint8), ("uint8_t", "uint8")),
    (ElementType("unsigned", torch.uint32, "int", ctypes.c_uint32), ("uint32_t", "uint32", "unsigned int")),
    (ElementType("size_t", torch.uint64, "int", ctypes.c_uint64), ("uint64_t", "uint64", "unsigned long long")),
    (ElementType("bool", torch.bool, "bool", ctypes.c_bool), ()),
)
_BY_NAME = {name: kind for kind, names in _TYPES for name in (kind.c_name, *names)}


def element_type(name: str) -> ElementType | None:
    """By C's name or torch's; None if it is neither."""
    return _BY_NAME.get(name.removeprefix("std::"))
