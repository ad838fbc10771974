"""Reads a CUDA source: which kernels it defines, and with which parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.custom.errors import SourceError

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BOUNDS = re.compile(r"__launch_bounds__\s*\([^()]*\)")
_KERNEL = re.compile(
    r"(?P<template>\btemplate\s*<[^{};]*>\s*)?(?:extern\s*\"C\"\s*)?(?:static\s+|inline\s+)*"
    r"\b__global__\s+(?:static\s+|inline\s+)*void\s+(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)\s*\{"
)
_DYNAMIC_SHARED = re.compile(
    r"\bextern\s+__shared__\s+(?:__align__\s*\([^()]*\)\s*)?(?P<type>[\w:\s]+?)\s*\b(?P<name>\w+)\s*\[\s*\]\s*;"
)


@dataclass(frozen=True, slots=True)
class DeclaredParameter:
    """A parameter as the source writes it."""

    type: str
    """Without `const`, `__restrict__` and the star."""
    name: str
    pointer: bool
    const: bool
    """Whether what it points at is."""


@dataclass(frozen=True, slots=True)
class DeclaredKernel:
    """A `__global__` function with a body."""

    name: str
    parameters: tuple[DeclaredParameter, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A CUDA source file and the one kernel of it that is meant."""

    path: Path
    text: str
    kernel: DeclaredKernel

    @property
    def host_text(self) -> str:
        """The source for a C++ compiler: dynamic shared memory becomes a pointer, all else stays."""
        return _DYNAMIC_SHARED.sub(r"\g<type>*& \g<name> = headrace::dynamic_shared<\g<type>>();", self.text)


def read_source(path: Path, kernel: str | None) -> Source:
    """The source in `path`, with its kernel of that name, or its only one. Raises SourceError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} can't be read: {error}") from error
    found, templates = _kernels(text)
    names = ", ".join(one.name for one in found)
    chosen = found if kernel is None else [one for one in found if one.name == kernel]
    if len(chosen) == 1:
        return Source(path, text, chosen[0])
    if kernel is not None and kernel in templates:
        raise SourceError(f"{path.name}: {kernel} is a template: write a __global__ function that isn't, and name it")
    if chosen:
        problem = f"it defines several kernels: choose one by CustomOp(..., kernel=...) of {names}"
    elif kernel is not None:
        problem = f"it defines no kernel {kernel}, but {names or 'none at all'}"
    else:
        problem = "it defines no kernel: a kernel is a __global__ void function with a body, and no template"
    raise SourceError(f"{path.name}: {problem}")


def _kernels(text: str) -> tuple[list[DeclaredKernel], set[str]]:
    """The kernels, and the names of those that are templates."""
    code = _BOUNDS.sub(" ", _COMMENT.sub(" ", text))
    found: list[DeclaredKernel] = []
    templates: set[str] = set()
    for match in _KERNEL.finditer(code):
        if match["template"]:
            templates.add(match["name"])
        else:
            parts = [part for part in match["parameters"].split(",") if part.split() not in ([], ["void"])]
            found.append(DeclaredKernel(match["name"], tuple(map(parse_parameter, parts))))
    return found, templates


def parse_parameter(text: str) -> DeclaredParameter:
    """`const float* __restrict__ x` and the like."""
    words = re.findall(r"\w+(?:::\w+)*|\*|&", text.split("=", maxsplit=1)[0])
    name = words.pop() if words else ""
    pointer = "*" in words
    const = "const" in (words[: words.index("*")] if pointer else words)
    kept: Sequence[str] = [
        word for word in words if word not in ("const", "__restrict__", "__restrict", "volatile", "*")
    ]
    return DeclaredParameter(" ".join(kept), name, pointer, const)
