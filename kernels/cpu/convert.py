"""Numbers from one type to another; bf16 and f16 are uint16 arrays of their bits."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.buffers import pointer
from kernels.cpu.library import Library


def _convert(library: Library, operation: str, numbers: NDArray[Any], expected: type, result: type) -> NDArray[Any]:
    if numbers.dtype != expected:
        raise TypeError(f"{operation} takes {np.dtype(expected)}, not {numbers.dtype}")
    converted: NDArray[Any] = np.empty(numbers.shape, result)
    library.call(operation, pointer(numbers), pointer(converted), ctypes.c_int64(numbers.size))
    return converted


def float_to_bf16(library: Library, numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bf16, ties to even."""
    return _convert(library, "float_to_bf16", numbers, np.float32, np.uint16)


def bf16_to_float(library: Library, numbers: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact."""
    return _convert(library, "bf16_to_float", numbers, np.uint16, np.float32)


def float_to_f16(library: Library, numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest half-precision number, ties to even."""
    return _convert(library, "float_to_f16", numbers, np.float32, np.uint16)


def f16_to_float(library: Library, numbers: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact."""
    return _convert(library, "f16_to_float", numbers, np.uint16, np.float32)


def exponential(library: Library, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """e to the power of each number, within 2 units in the last place."""
    return _convert(library, "exponential", numbers, np.float32, np.float32)
