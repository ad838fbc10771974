"""Makes TRITON_INTERPRET=1 compute what a GPU would, in bfloat16 and float8 too.

Triton's interpreter holds bfloat16 as uint16 and float8 as uint8, and silently multiplies and adds these bit
patterns, truncates where hardware rounds, and doesn't carry a rounded mantissa into the exponent
(https://github.com/triton-lang/triton/issues/11584). With numpy 2.4 it can't loop over a tensor's value either
(https://github.com/triton-lang/triton/issues/9171). `install` replaces those parts: conversions round to nearest
even and saturate, products and elementwise operations run in float32 and round once. Reductions of bfloat16, which
stay wrong, raise: a kernel has to convert first.

It reaches into private names of Triton 3.6; its own tests say so when another version moves them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

Array = NDArray[Any]
Handle = interpreter.TensorHandle
FLOATS: dict[Any, torch.dtype] = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_installed = False


def install() -> None:
    """Repair the interpreter of this process; more than once is as good as once."""
    global _installed  # noqa: PLW0603
    if _installed:
        return
    _installed = True
    builder = interpreter.InterpreterBuilder
    interpreter._convert_float = convert_with(interpreter._convert_float)
    builder.cast_impl = _cast
    builder.create_dot = _dot_with(builder.create_dot)
    builder.binary_op = _elementwise_with(builder.binary_op)
    builder.unary_op = _elementwise_with(builder.unary_op)
    builder.get_bf16 = lambda self, value: Handle(_to_bf16(np.array([value])), tl.bfloat16)
    interpreter.ReduceOps.apply_impl = _refusing(interpreter.ReduceOps.apply_impl)
    interpreter.ScanOps.apply_impl = _refusing(interpreter.ScanOps.apply_impl)
    interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)


def convert_with(original: Callable[..., Array]) -> Callable[..., Array]:
    """Conversion between float types given and returned as bits; `original` serves what isn't round-to-nearest."""

    def convert(data: Array, source: Any, target: Any, rounding: Any) -> Array:
        if source not in FLOATS or target not in FLOATS:
            return original(data, source, target, rounding)
        if rounding is not None and rounding != interpreter._ir.ROUNDING_MODE.RTNE:
            return original(data, source, target, rounding)
        values = _tensor(data, source)
        if target.is_fp8():
            greatest = torch.finfo(FLOATS[target]).max
            values = values.float().clamp(-greatest, greatest)
        return _bits(values.to(FLOATS[target]), target).reshape(np.shape(data))

    return convert


def _tensor(data: Array, dtype: Any) -> torch.Tensor:
    """The flat numbers that the interpreter holds as `data`."""
    bits = np.ascontiguousarray(data).reshape(-1).view(BITS[dtype.primitive_bitwidth // 8])
    return torch.from_numpy(bits.copy()).view(FLOATS[dtype])


def _bits(values: torch.Tensor, dtype: Any) -> Array:
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    bits: Array = values.contiguous().view(unsigned[dtype.primitive_bitwidth // 8]).numpy()
    return bits


def _float32(handle: Any) -> Array:
    dtype = handle.dtype.scalar
    if dtype not in FLOATS:
        return np.asarray(handle.data, np.float32)
    return _tensor(handle.data, dtype).float().numpy().reshape(handle.data.shape)


def _to_bf16(values: Array) -> Array:
    rounded = torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(torch.bfloat16)
    return _bits(rounded, tl.bfloat16).reshape(values.shape)


def _is_short(handle: Any) -> bool:
    """Whether numpy has no type of its own for these numbers."""
    return handle.dtype.scalar in FLOATS and (handle.dtype.scalar == tl.bfloat16 or handle.dtype.scalar.is_fp8())


def _cast(self: Any, source: Any, target: Any) -> Any:
    wanted = target.scalar
    kind = interpreter._get_np_dtype(target)
    if source.dtype.scalar in FLOATS and wanted in FLOATS:
        data = interpreter._convert_float(source.data, source.dtype.scalar, wanted, None)
        return Handle(data.view(kind), wanted)
    data = _float32(source) if _is_short(source) else source.data
    return Handle(_to_bf16(data.astype(np.float32)) if wanted == tl.bfloat16 else data.astype(kind), wanted)


def _dot_with(original: Callable[..., Any]) -> Callable[..., Any]:
    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, inexact: Any) -> Any:
        if not (_is_short(a) or _is_short(b)):
            return original(self, a, b, d, precision, inexact)
        product = np.matmul(_float32(a), _float32(b), dtype=np.float32) + _float32(d)
        kind = d.dtype.scalar
        return Handle(_to_bf16(product) if kind == tl.bfloat16 else product.astype(d.data.dtype), kind)

    return dot


def _elementwise_with(original: Callable[..., Any]) -> Callable[..., Any]:
    """bfloat16 in, the operation in float32, one rounding; comparisons stay what they are."""

    def elementwise(self: Any, *arguments: Any) -> Any:
        *handles, operation = arguments
        if not any(handle.dtype.scalar == tl.bfloat16 for handle in handles):
            return original(self, *arguments)
        result = operation(*(_float32(handle) for handle in handles))
        if result.dtype == np.bool_:
            return Handle(result, tl.int1)
        return Handle(_to_bf16(result), tl.bfloat16)

    return elementwise


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(self: Any, inputs: Any) -> Any:
        if any(each.dtype.scalar == tl.bfloat16 for each in inputs):
            raise NotImplementedError("a reduction of bfloat16 isn't what a GPU does: convert to float32 first")
        return original(self, inputs)

    return reduce


def _with_index(original: Callable[..., None]) -> Callable[..., None]:
    """A tensor of one value is an index, whatever its number of dimensions."""

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(()).item()))

    return patch
