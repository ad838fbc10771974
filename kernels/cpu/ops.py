"""The operations between the matrix products, each alone, over numpy arrays; bf16 is the uint16 of its bits.

T rows of a step, H query heads, G key heads, D head size. The whole step (`kernels.cpu.step`) calls the same
functions of the library without coming back to Python.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int32, c_int64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.layers import AttentionLayer, Heads, RotaryLayer, Step, address, expect
from kernels.cpu.library import Team

Array = NDArray[Any]


def embed(team: Team, table: Array, ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """[V, hidden], [T] -> [T, hidden]."""
    vocab, hidden = table.shape
    expect(table, _stored(table), (vocab, hidden), "the table")
    expect(ids, np.int32, (len(ids),), "the ids")
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab:
        raise ValueError(f"a token id lies outside the {vocab} rows of the table")
    out = np.empty((len(ids), hidden), np.float32)
    _call(team, "embed", table, _is_float(table), ids, c_int64(len(ids)), c_int64(hidden), out)
    return out


def rms_norm(
    team: Team, x: NDArray[np.float32], weight: NDArray[np.float32], eps: float, dtype: type[np.generic]
) -> Array:
    """x [T, hidden] / sqrt(its mean square + eps) * weight [hidden], as float32 or uint16."""
    rows, hidden = x.shape
    expect(x, np.float32, (rows, hidden), "x")
    expect(weight, np.float32, (hidden,), "the weight")
    out = np.empty((rows, hidden), dtype)
    _call(team, "rms_norm", x, weight, c_float(eps), c_int64(rows), c_int64(hidden), out, _is_float(out))
    return out


def add_rows(team: Team, residual: NDArray[np.float32], x: Array) -> None:
    """Add x [T, hidden] of float32 or bf16 to the residual [T, hidden]."""
    rows, hidden = residual.shape
    expect(residual, np.float32, (rows, hidden), "the residual")
    expect(x, _stored(x), (rows, hidden), "x")
    _call(team, "add_rows", residual, x, _is_float(x), c_int64(rows), c_int64(hidden))


def silu_and_mul(team: Team, gate_up: Array) -> Array:
    """[T, 2 * inner] -> silu(first half) * second half, [T, inner]."""
    rows, both = gate_up.shape
    expect(gate_up, _stored(gate_up), (rows, both // 2 * 2), "gate and up")
    out = np.empty((rows, both // 2), gate_up.dtype)
    _call(team, "silu_and_mul", gate_up, c_int64(rows), c_int64(both // 2), out, _is_float(out))
    return out


def rotary_kv_write(
    team: Team,
    step: Step,
    heads: Heads,
    qkv: Array,
    cos_sin: NDArray[np.float32],
    arena: NDArray[np.uint8],
    layer_offset_bytes: int = 0,
    bias: NDArray[np.float32] | None = None,
    q_norm: NDArray[np.float32] | None = None,
    k_norm: NDArray[np.float32] | None = None,
    norm_eps: float = 1e-6,
) -> Array:
    """Split qkv [T, H + 2G, D]; add the bias, normalise and turn q and k, write k and v to their pages; returns q."""
    size = heads.head_size
    both = heads.heads + 2 * heads.kv_heads
    expect(qkv, _stored(qkv), (step.rows, both, size), "qkv")
    expect(cos_sin, np.float32, (len(cos_sin), 2, size // 2), "cos_sin")
    if step.context_len.size and step.context_len.max() > len(cos_sin):
        raise ValueError(f"position {step.context_len.max() - 1} is past the {len(cos_sin)} of cos_sin")
    for vector, shape, name in ((bias, (both, size), "bias"), (q_norm, (size,), "q_norm"), (k_norm, (size,), "k_norm")):
        if vector is not None:
            expect(vector, np.float32, shape, name)
    q = np.empty((step.rows, heads.heads, size), heads.element)
    layer = RotaryLayer(
        qkv=address(qkv),
        q=address(q),
        kv=_layer(arena, step, heads, layer_offset_bytes),
        bias=address(bias),
        q_norm=address(q_norm),
        k_norm=address(k_norm),
        cos_sin=address(cos_sin),
        qkv_stride=both * size,
        q_stride=heads.heads * size,
        norm_eps=norm_eps,
        qkv_is_float=_is_float(qkv),
    )
    _call(team, "rotary_kv_write", byref(step.struct), byref(heads.struct), byref(layer))
    return q


def paged_attention(
    team: Team,
    step: Step,
    heads: Heads,
    q: Array,
    arena: NDArray[np.uint8],
    scale: float,
    layer_offset_bytes: int = 0,
    dtype: type[np.generic] | None = None,
) -> Array:
    """Causal attention of q [T, H, D] over the pages of each request -> [T, H, D] of `dtype`, else of q's type."""
    shape = (step.rows, heads.heads, heads.head_size)
    expect(q, heads.element, shape, "q")
    out = np.empty(shape, dtype or heads.element)
    layer = AttentionLayer(
        q=address(q),
        kv=_layer(arena, step, heads, layer_offset_bytes),
        out=address(out),
        q_stride=heads.heads * heads.head_size,
        out_stride=heads.heads * heads.head_size,
        scale=scale,
        out_is_float=_is_float(out),
    )
    _call(team, "paged_attention", byref(step.struct), byref(heads.struct), byref(layer))
    return out


def _layer(arena: NDArray[np.uint8], step: Step, heads: Heads, layer_offset_bytes: int) -> int:
    """The address from which the offsets of pages lead to one layer's blocks."""
    expect(arena, np.uint8, (arena.size,), "the arena")
    step.check_pages(heads, arena.size - layer_offset_bytes)
    return int(arena.ctypes.data) + layer_offset_bytes


def _call(team: Team, operation: str, *arguments: Any) -> None:
    team.library.call(
        operation,
        team.handle,
        *(_pointer(argument) if isinstance(argument, np.ndarray) else argument for argument in arguments),
    )


def _pointer(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(address(array))


def _stored(array: Array) -> type[np.generic]:
    """The array's type if activations can have it."""
    if array.dtype not in (np.float32, np.uint16):
        raise TypeError(f"activations are float32 or the uint16 of bf16, not {array.dtype}")
    return np.float32 if array.dtype == np.float32 else np.uint16


def _is_float(array: Array) -> c_int32:
    return c_int32(_stored(array) is np.float32)
