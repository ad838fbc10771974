"""What a compiled kernel takes of a multiprocessor, and whether that is allowed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kernels.custom.compilers import Built
from kernels.custom.cubin import CompiledKernel, is_symbol_of, read_cubin
from kernels.custom.errors import ResourceError, SourceError

REGISTERS = 65_536
"""Of a multiprocessor, which a block has to fit into: the same from sm_50 on."""
RESERVED_SHARED_BYTES = 1024
"""Of a block, for the system."""
SHARED_BYTES = {"70": 96, "75": 64, "80": 164, "86": 100, "87": 164, "89": 100, "90": 228, "100": 228, "103": 228,
                "110": 228, "120": 100, "121": 100}  # fmt: skip
"""Shared memory of a multiprocessor in KiB, by compute capability (CUDA's programming guide)."""

_SPILLS = re.compile(
    r"Function properties for (?P<symbol>\S+)\s+(?:ptxas\s+(?:info\s*:|\.)\s*)?\d+ bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one kernel on one architecture."""

    registers: int
    """Of a thread."""
    spill_bytes: int
    """Stored and loaded by a thread because there weren't registers enough."""
    stack_bytes: int
    shared_bytes: int
    """Of a block: its own, and what is asked for at the launch."""


@dataclass(frozen=True, slots=True)
class Image:
    """A kernel compiled for one architecture."""

    architecture: str
    cubin: bytes
    kernel: CompiledKernel
    resources: Resources


def make_image(architecture: str, built: Built, name: str, dynamic_shared_bytes: int) -> Image:
    """Find the kernel `name` in what was built."""
    found = [kernel for kernel in read_cubin(built.cubin) if is_symbol_of(kernel.symbol, name)]
    if len(found) != 1:
        symbols = ", ".join(kernel.symbol for kernel in read_cubin(built.cubin)) or "none"
        raise SourceError(f"the compiled kernels are {symbols}: exactly one of them must be {name}")
    kernel = found[0]
    spills = {match["symbol"]: int(match["stores"]) + int(match["loads"]) for match in _SPILLS.finditer(built.log)}
    if kernel.symbol not in spills:
        raise ResourceError(f"the compiler doesn't say what {name} spills for {architecture}:\n{built.log}")
    shared = kernel.shared_bytes + dynamic_shared_bytes
    resources = Resources(kernel.registers, spills[kernel.symbol], kernel.stack_bytes, shared)
    return Image(architecture, built.cubin, kernel, resources)


def check_resources(image: Image, name: str, threads: int, most_spill_bytes: int) -> None:
    """Raise ResourceError if a block of `threads` doesn't fit, or if more is spilled than allowed."""
    resources, where = image.resources, f"{name} on {image.architecture}"
    if resources.spill_bytes > most_spill_bytes:
        raise ResourceError(
            f"{where} spills {resources.spill_bytes} bytes of registers to memory, and {most_spill_bytes} are allowed: "
            "keep fewer values at once, or allow it by CustomOp(..., most_spill_bytes=...)"
        )
    if resources.registers * threads > REGISTERS:
        raise ResourceError(
            f"{where} takes {resources.registers} registers, and a block of {threads} threads has "
            f"{REGISTERS // threads} for each: take fewer threads or declare __launch_bounds__({threads})"
        )
    capability = image.architecture.removeprefix("sm_").rstrip("af")
    if capability in SHARED_BYTES:
        most = SHARED_BYTES[capability] * 1024 - RESERVED_SHARED_BYTES
        if resources.shared_bytes > most:
            raise ResourceError(f"{where} takes {resources.shared_bytes} bytes of shared memory, and {most} are there")
