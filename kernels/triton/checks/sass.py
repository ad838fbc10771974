"""What a compiled kernel takes and does, read from its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

from kernels.triton.checks.offline import Compiled

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
MATRIX = ("HMMA", "HGMMA", "IMMA", "QMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "DMMA", "v_mfma")
WIDTHS = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
"""Bytes of a memory instruction by its suffix; 4 without one."""

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_LABEL = re.compile(r"^\s*(\.L\w+):")
_BRANCH = re.compile(r"\bBRA\b.*?`\((\.L\w+)\)")


@dataclass(frozen=True, slots=True)
class Loop:
    """An innermost loop: how often each opcode stands in it."""

    opcodes: Counter[str]
    threads: int

    @property
    def loaded_bytes(self) -> int:
        """What one iteration of one program reads from global memory, the same word by several threads each time."""
        return self.threads * sum(
            count * width(opcode) for opcode, count in self.opcodes.items() if opcode.startswith(("LDG", "LDGSTS"))
        )

    @property
    def matrix(self) -> int:
        return sum(count for opcode, count in self.opcodes.items() if opcode.startswith(MATRIX))


@dataclass(frozen=True, slots=True)
class Resources:
    """What `describe` finds."""

    registers: int
    spills: int
    """Instructions that touch local memory, or bytes of it if there are none (NVIDIA); registers (AMD)."""
    shared_bytes: int
    matrix: tuple[str, ...]
    """Families of matrix instructions."""
    loads: Counter[int]
    """Instructions that load from global memory, by bytes for each thread."""
    instructions: int
    loops: tuple[Loop, ...] = ()


def describe(compiled: Compiled) -> Resources:
    """Read a kernel's code: SASS of NVIDIA's, the assembler's listing of AMD's."""
    if "amdgcn" in compiled.asm:
        return _describe_amd(compiled, compiled.asm["amdgcn"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        listing = _tool("nvdisasm", "-c", file.name)
    registers, stack, local = (int(_found(rf"{name}:(\d+)", usage)) for name in ("REG", "STACK", "LOCAL"))
    opcodes = [_opcode(line[1]) for line in map(_INSTRUCTION.match, listing.splitlines()) if line]
    touches = sum(opcode.startswith(("LDL", "STL")) for opcode in opcodes)
    return Resources(
        registers=registers,
        spills=touches or stack + local,
        shared_bytes=compiled.shared_bytes,
        matrix=tuple(sorted({opcode.split(".")[0] for opcode in opcodes if opcode.startswith(MATRIX)})),
        loads=Counter(width(opcode) for opcode in opcodes if opcode.startswith("LDG")),
        instructions=len(opcodes),
        loops=tuple(innermost_loops(listing, 32 * compiled.warps)),
    )


def _describe_amd(compiled: Compiled, listing: str) -> Resources:
    opcodes = [line.split()[0] for line in listing.splitlines() if re.match(r"^\t[a-z]", line)]
    widths = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short_d16": 2, "ubyte": 1}
    loads: Counter[int] = Counter()
    for opcode in opcodes:
        if opcode.startswith(("global_load_", "buffer_load_")):
            suffix = opcode.split("_load_")[1]
            loads[next((n for name, n in widths.items() if suffix.startswith(name)), 4)] += 1
    return Resources(
        registers=int(_found(r"; NumVgprs: (\d+)", listing)),
        spills=int(_found(r"\.vgpr_spill_count:\s*(\d+)", listing)) + int(_found(r"; ScratchSize: (\d+)", listing)),
        shared_bytes=compiled.shared_bytes,
        matrix=tuple(sorted({"MFMA" for opcode in opcodes if opcode.startswith("v_mfma")})),
        loads=loads,
        instructions=len(opcodes),
    )


def innermost_loops(listing: str, threads: int) -> list[Loop]:
    """Loops of a SASS listing that contain no other: a label up to a branch back to it."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append(instruction[1])
    spans = []
    for end, text in enumerate(code):
        branch = _BRANCH.search(text)
        if branch and labels.get(branch[1], end) < end:
            spans.append((labels[branch[1]], end))
    inner = [
        (begin, end)
        for begin, end in spans
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in spans)
    ]
    return [Loop(Counter(_opcode(text) for text in code[begin : end + 1]), threads) for begin, end in inner]


def width(opcode: str) -> int:
    """Bytes that one thread moves with a memory instruction."""
    return next((size for suffix, size in WIDTHS.items() if suffix in f"{opcode}."), 4)


def _opcode(instruction: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"nothing like {pattern!r} in what the compiler wrote")
    return match[1]


def _tool(name: str, *arguments: str) -> str:
    command = [str(TOOLS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
