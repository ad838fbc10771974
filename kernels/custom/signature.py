"""What a kernel takes: tensors with shapes in letters, and numbers.

A signature is written as the kernel's own parameters are, in their order, with shapes behind the tensors:
`const float gate_up[*rows, 2*inner], float out[*rows, inner], int rows, int inner, float eps`. `const` is what the
kernel reads; what it isn't is what the kernel fills. A dimension is a number, a name, or a multiple of a name, and
`*rows` stands for any number of dimensions in front. A number of a dimension's name gets its size (the product of
them for `*rows`); every other number is given at the call, behind the tensors.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.custom.errors import ArgumentError, SignatureError
from kernels.custom.source import DeclaredKernel, DeclaredParameter, parse_parameter
from kernels.custom.types import ElementType, element_type

_ITEM = re.compile(r"(?P<head>[^\[\],]+)(?:\[(?P<shape>[^\[\]]*)\])?\s*(?:,|$)")
_DIMENSION = re.compile(r"(?:(?P<star>\*)|(?P<factor>\d+)\s*\*\s*)?(?P<name>[A-Za-z_]\w*)|(?P<size>\d+)")

Number = int | float | bool


@dataclass(frozen=True, slots=True)
class Dimension:
    """`factor * name`, a number (without a name), or any number of dimensions (`star`)."""

    factor: int
    name: str | None = None
    star: bool = False

    def __str__(self) -> str:
        if self.name is None:
            return str(self.factor)
        return f"*{self.name}" if self.star else f"{self.factor}*{self.name}" if self.factor > 1 else self.name


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel: a tensor if it has a shape, else a number."""

    name: str
    type: ElementType
    shape: tuple[Dimension, ...] | None
    const: bool = False

    @property
    def size_bytes(self) -> int:
        """In the kernel's parameters: a pointer's size for a tensor."""
        return self.type.size_bytes if self.shape is None else 8

    def __str__(self) -> str:
        shape = "" if self.shape is None else f"[{', '.join(map(str, self.shape))}]"
        return f"{'const ' if self.const else ''}{self.type.c_name} {self.name}{shape}"


Sizes = Mapping[str, tuple[int, ...]]
"""The size of each named dimension; several for a starred one."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A kernel's parameters in its order."""

    parameters: tuple[Parameter, ...]

    def __post_init__(self) -> None:
        names = [one.name for one in self.parameters]
        if len(set(names)) < len(names):
            raise SignatureError(f"each parameter needs a name of its own: {self}")
        if not self.inputs or not self.outputs:
            raise SignatureError(f"it needs a tensor that is read (const) and one that is filled: {self}")
        known = {dimension.name for one in self.inputs for dimension in one.shape or ()}
        for output in self.outputs:
            for dimension in output.shape or ():
                if dimension.name not in known and dimension.name is not None:
                    raise SignatureError(f"no tensor that is read has {dimension.name}, a dimension of {output}")

    def __str__(self) -> str:
        return ", ".join(map(str, self.parameters))

    @property
    def inputs(self) -> tuple[Parameter, ...]:
        return tuple(one for one in self.parameters if one.shape is not None and one.const)

    @property
    def outputs(self) -> tuple[Parameter, ...]:
        return tuple(one for one in self.parameters if one.shape is not None and not one.const)

    @property
    def dimensions(self) -> frozenset[str]:
        """Names of the dimensions of what is read."""
        return frozenset(one.name for tensor in self.inputs for one in tensor.shape or () if one.name is not None)

    @property
    def given(self) -> tuple[Parameter, ...]:
        """The numbers that a call gives."""
        return tuple(one for one in self.parameters if one.shape is None and one.name not in self.dimensions)

    @property
    def schema(self) -> str:
        """In the language of `torch.library`."""
        numbers = [f"{one.type.schema} {one.name}" for one in self.given]
        returned = ", ".join(["Tensor"] * len(self.outputs))
        return f"({', '.join([f'Tensor {one.name}' for one in self.inputs] + numbers)}) -> " + (
            returned if len(self.outputs) == 1 else f"({returned})"
        )

    def bind(self, tensors: Sequence[Tensor]) -> Sizes:
        """The sizes of the dimensions when it is called with these. Raises ArgumentError."""
        if len(tensors) != len(self.inputs):
            raise ArgumentError(f"it takes {len(self.inputs)} tensors, not {len(tensors)}: {self}")
        sizes: dict[str, tuple[int, ...]] = {}
        for parameter, tensor in zip(self.inputs, tensors, strict=True):
            if tensor.dtype != parameter.type.dtype:
                raise ArgumentError(f"{parameter.name} must be {parameter.type.dtype}, not {tensor.dtype}")
            if tensor.device != tensors[0].device:
                raise ArgumentError(f"{parameter.name} is on {tensor.device}, the first tensor on {tensors[0].device}")
            _bind_shape(parameter, tuple(tensor.shape), sizes)
        return sizes

    def numbers(self, sizes: Sizes, given: Sequence[Number]) -> dict[str, Number]:
        """Every number that the kernel takes, by its name. Raises ArgumentError."""
        if len(given) != len(self.given):
            raise ArgumentError(f"it takes {len(self.given)} numbers behind the tensors, not {len(given)}: {self}")
        told = dict(zip((one.name for one in self.given), given, strict=True))
        values: dict[str, Number] = {}
        for one in self.parameters:
            if one.shape is None:
                values[one.name] = told[one.name] if one.name in told else math.prod(sizes[one.name])
                if not one.type.holds(values[one.name]):
                    raise ArgumentError(f"{one.name}={values[one.name]} doesn't fit into {one.type.c_name}")
        return values

    def output_shapes(self, sizes: Sizes) -> list[tuple[int, ...]]:
        return [_shape(one, sizes) for one in self.outputs]

    def empty_outputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors to fill, on the device of `tensors`."""
        shapes = self.output_shapes(self.bind(tensors))
        device = tensors[0].device
        return [
            torch.empty(shape, dtype=one.type.dtype, device=device)
            for shape, one in zip(shapes, self.outputs, strict=True)
        ]

    def arguments(self, addresses: Sequence[int], numbers: Mapping[str, Number]) -> list[ctypes._SimpleCData[Any]]:
        """The kernel's parameters in its own types and order; `addresses` are the tensors' in the same order."""
        waiting = iter(addresses)
        values: list[ctypes._SimpleCData[Any]] = []
        for one in self.parameters:
            if one.shape is not None:
                values.append(ctypes.c_void_p(next(waiting)))
            else:
                assert one.type.ctype is not None  # `numbers` refuses it
                values.append(one.type.ctype(numbers[one.name]))
        return values

    def check_declared(self, kernel: DeclaredKernel) -> None:
        """Raise SignatureError unless the source declares these parameters. Types that it names itself are let pass."""
        declared = kernel.parameters
        if len(declared) != len(self.parameters):
            raise SignatureError(
                f"{kernel.name} takes {len(declared)} parameters, and the signature has {len(self.parameters)}: {self}"
            )
        for number, (one, own) in enumerate(zip(self.parameters, declared, strict=True)):
            kind = element_type(own.type)
            differs = own.pointer != (one.shape is not None) or (kind is not None and kind.dtype != one.type.dtype)
            if differs or (own.pointer and own.const != one.const):
                written = f"{'const ' if own.const else ''}{own.type}{'*' if own.pointer else ''} {own.name}"
                raise SignatureError(
                    f"parameter {number} of {kernel.name} is '{written}', and '{one}' in the signature"
                )

    def check_layout(self, name: str, layout: Sequence[tuple[int, int]]) -> None:
        """Raise SignatureError unless the compiled kernel has parameters of these (offset, size), in bytes."""
        own: list[tuple[int, int]] = []
        end = 0
        for one in self.parameters:
            offset = -(-end // one.size_bytes) * one.size_bytes
            own.append((offset, one.size_bytes))
            end = offset + one.size_bytes
        if own != list(layout):
            raise SignatureError(
                f"the compiled {name} has parameters of (offset, bytes) {list(layout)}, and the signature's are {own}: "
                f"{self}"
            )


def parse_signature(text: str) -> Signature:
    """Read a signature; see the module. Raises SignatureError."""
    parameters: list[Parameter] = []
    end = 0
    for match in _ITEM.finditer(text):
        if match.start() != end:
            break
        end = match.end()
        declared = parse_parameter(match["head"])
        kind = element_type(declared.type)
        if kind is None:
            raise SignatureError(f"'{match['head'].strip()}' has no type that is known: float, __nv_bfloat16, int, ...")
        if declared.pointer and match["shape"] is None:
            raise SignatureError(f"'{match['head'].strip()}' is a tensor: write its shape behind it, as in x[*n]")
        shape = None if match["shape"] is None else _parse_shape(match["shape"], match.group().strip(" ,"))
        parameters.append(Parameter(declared.name, kind, shape, declared.const and shape is not None))
    if end != len(text):
        raise SignatureError(f"the signature can't be read from '{text[end:]}' on")
    return Signature(tuple(parameters))


def signature_of(kernel: DeclaredKernel) -> Signature:
    """That of a kernel that makes each element of its result from one of what it reads: `(const T* x, T* y, int n)`."""
    pointers = [one for one in kernel.parameters if one.pointer]
    counts = [one for one in kernel.parameters if not one.pointer]
    plain = (
        [one.const for one in pointers] == [True, False]
        and pointers[0].type == pointers[1].type
        and len(counts) <= 1
        and all(kind is not None and kind.schema == "int" for kind in map(element_type, (one.type for one in counts)))
    )
    if not plain:
        raise SignatureError(
            f"the shapes of what {kernel.name} takes can't be told from its declaration: give "
            f"CustomOp(..., signature='{', '.join(map(_suggested, kernel.parameters))}') with the shapes filled in"
        )
    size = counts[0].name if counts else "n"
    return parse_signature(", ".join(_suggested(one, f"*{size}") for one in kernel.parameters))


def _suggested(one: DeclaredParameter, shape: str = "...") -> str:
    return f"{'const ' if one.const and one.pointer else ''}{one.type} {one.name}{f'[{shape}]' if one.pointer else ''}"


def _parse_shape(text: str, whole: str) -> tuple[Dimension, ...]:
    dimensions: list[Dimension] = []
    for part in text.split(",") if text.strip() else []:
        match = _DIMENSION.fullmatch(part.strip())
        if match is None or (match["star"] and dimensions):
            raise SignatureError(f"'{part.strip()}' in '{whole}' is no dimension: write n, 2*n, 64, or *n as the first")
        factor = int(match["size"] or match["factor"] or 1)
        dimensions.append(Dimension(factor, match["name"], star=bool(match["star"])))
    return tuple(dimensions)


def _bind_shape(parameter: Parameter, shape: tuple[int, ...], sizes: dict[str, tuple[int, ...]]) -> None:
    wanted = parameter.shape or ()
    starred = 1 if wanted and wanted[0].star else 0
    front = len(shape) - len(wanted) + starred
    if front < 0 or (not starred and front != 0):
        raise _misshapen(parameter, shape, sizes)
    found = [(wanted[0].name, shape[:front])] if starred else []
    for dimension, size in zip(wanted[starred:], shape[front:], strict=True):
        if size % dimension.factor or (dimension.name is None and size != dimension.factor):
            raise _misshapen(parameter, shape, sizes)
        if dimension.name is not None:
            found.append((dimension.name, (size // dimension.factor,)))
    for name, extent in found:
        if name is not None and sizes.setdefault(name, extent) != extent:
            raise _misshapen(parameter, shape, sizes)


def _misshapen(parameter: Parameter, shape: tuple[int, ...], sizes: Sizes) -> ArgumentError:
    wanted = ", ".join(map(str, parameter.shape or ()))
    known = "".join(f", {name}={list(size) if len(size) != 1 else size[0]}" for name, size in sizes.items())
    return ArgumentError(f"{parameter.name} has shape {list(shape)}, and must have [{wanted}]{known}")


def _shape(parameter: Parameter, sizes: Sizes) -> tuple[int, ...]:
    shape: list[int] = []
    for one in parameter.shape or ():
        shape += [one.factor] if one.name is None else [one.factor * size for size in sizes[one.name]]
    return tuple(shape)
