"""The linear operation over packed weights, and the activations that it takes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.buffers import pointer
from kernels.cpu.library import Library, Team
from kernels.cpu.packing import Format, Packed, WeightsStruct


class Then(IntEnum):
    """What becomes of the sums."""

    STORE_FLOAT = 0
    STORE_BF16 = 1
    ADD_FLOAT = 2
    SILU_MULTIPLY_FLOAT = 3
    SILU_MULTIPLY_BF16 = 4
    BEST = 5


BEST = np.dtype([("value", np.float32), ("index", np.int32)])
"""A row's largest sum and its output; of equal ones the first."""
_RESULTS: dict[Then, np.dtype[Any]] = {
    Then.STORE_FLOAT: np.dtype(np.float32),
    Then.STORE_BF16: np.dtype(np.uint16),
    Then.ADD_FLOAT: np.dtype(np.float32),
    Then.SILU_MULTIPLY_FLOAT: np.dtype(np.float32),
    Then.SILU_MULTIPLY_BF16: np.dtype(np.uint16),
    Then.BEST: BEST,
}


class ActivationsStruct(ctypes.Structure):
    """`headrace::Activations`: 32 bytes."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("stride_bytes", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
    )


class JobStruct(ctypes.Structure):
    """`headrace::LinearJob`: 112 bytes."""

    _fields_ = (
        ("weights", WeightsStruct),
        ("x", ActivationsStruct),
        ("rows", ctypes.c_int64),
        ("then", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("to", ctypes.c_void_p),
        ("to_stride", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Quantised:
    """Rows of activations as int8: value = scale * int8, with a scale for each group of `group` inputs.

    `values` is [rows, groups * group], `scales` and `offsets` (-128 times a group's sum) are [rows, groups].
    """

    group: int
    values: NDArray[np.int8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.int32]


def quantise(library: Library, rows: NDArray[Any], group: int) -> Quantised:
    """[rows, inputs] floats, or bf16 as uint16, to int8 in groups of 32 or 64 inputs."""
    if group not in (32, 64):
        raise ValueError(f"activations are quantised in groups of 32 or 64, not {group}")
    operation = {np.dtype(np.float32): "quantize", np.dtype(np.uint16): "quantize_bf16"}.get(rows.dtype)
    if operation is None:
        raise TypeError(f"activations to be quantised are float32 or bf16 as uint16, not {rows.dtype}")
    count, inputs = rows.shape
    groups = -(-inputs // group)
    quantised = Quantised(
        group,
        np.empty((count, groups * group), np.int8),
        np.empty((count, groups), np.float32),
        np.empty((count, groups), np.int32),
    )
    to = (pointer(quantised.values), pointer(quantised.scales), pointer(quantised.offsets))
    library.call(operation, pointer(rows), ctypes.c_int64(count), ctypes.c_int64(inputs), ctypes.c_int(group), *to)
    return quantised


def _activations(packed: Packed, x: NDArray[Any] | Quantised) -> tuple[int, ActivationsStruct]:
    if isinstance(x, Quantised):
        groups = -(-packed.inputs // x.group)
        if x.group != packed.format.scale_inputs or x.scales.shape[1] != groups:
            raise ValueError(
                f"{packed.format.name} weights of {packed.inputs} inputs take activations in groups of "
                f"{packed.format.scale_inputs}, not {x.scales.shape[1]} groups of {x.group}"
            )
        scales, offsets = x.scales.ctypes.data, x.offsets.ctypes.data
        return len(x.values), ActivationsStruct(pointer(x.values), x.values.shape[1], scales, offsets)
    expected = {Format.F32: np.dtype(np.float32), Format.BF16: np.dtype(np.uint16)}.get(packed.format)
    if x.dtype != expected or x.shape[1:] != (packed.inputs,):
        raise TypeError(
            f"{packed.format.name} weights take [rows, {packed.inputs}] of {expected or 'quantised activations'}, "
            f"not {list(x.shape)} of {x.dtype}"
        )
    return len(x), ActivationsStruct(pointer(x), packed.inputs * x.itemsize, None, None)


def linear(
    team: Team,
    packed: Packed,
    x: NDArray[Any] | Quantised,
    then: Then,
    *,
    to: NDArray[Any] | None = None,
    columns: int | None = None,
    bias: NDArray[np.float32] | None = None,
) -> NDArray[Any]:
    """x [rows, inputs] times the transposed weights: [rows, outputs], or [rows] of BEST.

    SILU_MULTIPLY wants gate and up interleaved, and gives the `columns` that each of them has. ADD_FLOAT adds to `to`;
    elsewhere `to` saves an allocation.
    """
    rows, activations = _activations(packed, x)
    gated = then in (Then.SILU_MULTIPLY_FLOAT, Then.SILU_MULTIPLY_BF16)
    if gated and columns is None:
        raise ValueError("say how many columns gate and up have: the packed weights are padded")
    width = columns if gated and columns is not None else packed.outputs
    shape: tuple[int, ...] = (rows,) if then is Then.BEST else (rows, width)
    if to is None:
        if then is Then.ADD_FLOAT:
            raise ValueError("ADD_FLOAT needs something to add to")
        to = np.empty(shape, dtype=_RESULTS[then])
    if to.shape != shape or to.dtype != _RESULTS[then]:
        raise TypeError(f"{then.name} gives {list(shape)} of {_RESULTS[then]}, not {list(to.shape)} of {to.dtype}")
    if bias is not None and (bias.shape != (packed.outputs,) or bias.dtype != np.float32 or then is Then.BEST):
        raise TypeError(f"a bias is [{packed.outputs}] of float32 and doesn't go with BEST")
    at = None if bias is None else pointer(bias)
    job = JobStruct(packed.struct(), activations, rows, then, 0, pointer(to), width, width, at)
    team.library.call("linear", team.handle, ctypes.byref(job))
    return to
