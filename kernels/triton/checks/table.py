"""What every kernel compiles to on every architecture, held against its limits and against what is stored.

A limit is the hardware's or ours; `bounds.json` holds how many bytes each innermost loop loads and how many registers
each kernel takes, so that a change that costs something has to say so: `python -m kernels.triton.checks --write`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kernels.triton.checks.cases import Case
from kernels.triton.checks.offline import compiling
from kernels.triton.checks.sass import Resources, describe
from kernels.triton.configs import SHARED_BYTES, Architecture

STORED = Path(__file__).parent / "bounds.json"
Bounds = dict[str, int]
"""`registers`, `loop_bytes`: the most that any innermost loop loads each time, for all threads of a program."""

MATRIX_OF_PREFILL: dict[Architecture, str] = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "MFMA"}
"""Blocks of 64 rows and more, in 16 bits, have to reach the newest matrix unit; those of 16 rows can't."""
WITH_PRODUCTS = ("decode_kernel", "prefill_kernel", "int8_kernel", "int4_kernel", "shrink_kernel", "expand_kernel")
NARROW_LOADS = {("expand_kernel", architecture) for architecture in SHARED_BYTES} | {("int4_kernel", "gfx942")}
"""Loads as wide as a rank; and AMD's layout for half bytes, which takes 8 bytes at once."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel of one case on one architecture."""

    case: str
    architecture: Architecture
    kernel: str
    warps: int
    stages: int
    resources: Resources

    @property
    def key(self) -> str:
        return f"{self.architecture} | {self.case} | {self.kernel}"

    @property
    def loop_bytes(self) -> int:
        return max((loop.loaded_bytes for loop in self.resources.loops), default=0)

    @property
    def bounds(self) -> Bounds:
        return {"registers": self.resources.registers, "loop_bytes": self.loop_bytes}

    def failures(self, stored: Bounds | None) -> list[str]:
        """What is wrong with it."""
        found = []
        resources = self.resources
        if resources.spills:
            found.append(f"spills ({resources.spills})")
        if resources.shared_bytes > SHARED_BYTES[self.architecture]:
            found.append(f"takes {resources.shared_bytes} of {SHARED_BYTES[self.architecture]} bytes of shared memory")
        if not resources.loads[16] and (self.kernel, self.architecture) not in NARROW_LOADS:
            found.append("has no 128-bit loads")
        wanted = self.wanted_matrix
        if wanted and wanted not in resources.matrix:
            found.append(f"has no {wanted}, only {', '.join(resources.matrix) or 'scalar products'}")
        if stored is None:
            found.append("has no stored bounds")
            return found
        found += [
            f"{name} grew from {stored[name]} to {now}" for name, now in self.bounds.items() if now > stored[name]
        ]
        return found

    @property
    def wanted_matrix(self) -> str | None:
        """The family of matrix instructions that it has to contain."""
        if self.kernel not in WITH_PRODUCTS:
            return None
        wide = self.kernel == "prefill_kernel" or self.case.endswith(("64 rows", "512 rows"))
        if wide and "float32" not in self.case:
            return MATRIX_OF_PREFILL[self.architecture]
        return "MFMA" if self.architecture == "gfx942" else "HMMA"


def rows(case: Case, architecture: Architecture) -> list[Row]:
    """Compile one case for one architecture."""
    with compiling(architecture) as found:
        case.run(architecture)
    named = {}
    for each in found:
        name = each.name if each.name not in named else f"{each.name}, again"
        named[name] = Row(case.name, architecture, name, each.warps, each.stages, describe(each))
    return list(named.values())


def stored_bounds() -> dict[str, Bounds]:
    found: dict[str, Bounds] = json.loads(STORED.read_text()) if STORED.exists() else {}
    return found


def write_bounds(found: list[Row]) -> None:
    bounds = {row.key: row.bounds for row in sorted(found, key=lambda row: row.key)}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in bounds.items()]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def render(row: Row, failures: list[str]) -> str:
    """One line of the table."""
    resources = row.resources
    loads = " ".join(f"{count}x{width}" for width, count in sorted(resources.loads.items(), reverse=True))
    columns = [
        f"{row.architecture:7}", f"{row.case:22}", f"{row.kernel:16}", f"{row.warps}w{row.stages}s",
        f"{resources.registers:4}", f"{resources.shared_bytes:7}", f"{resources.spills:3}",
        f"{'+'.join(resources.matrix) or '-':8}", f"{loads:22}", f"{resources.instructions:5}", f"{row.loop_bytes:6}",
    ]  # fmt: skip
    return " ".join(columns) + (f"  FAILS: {'; '.join(failures)}" if failures else "")


HEADER = (
    f"{'target':7} {'case':22} {'kernel':16} cfg  regs  shared spl {'matrix':8} {'loads x bytes':22} instr "
    "bytes/iteration"
)
