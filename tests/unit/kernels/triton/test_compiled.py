"""Every kernel compiled for GPUs that aren't here, through its own launch path, against limits and stored bounds."""

from __future__ import annotations

import os
from collections import Counter
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("there is no Triton for this machine", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted kernel can't be compiled", allow_module_level=True)

from kernels.triton.architecture import architecture_of_capability
from kernels.triton.checks import sass, table
from kernels.triton.checks.cases import Case, cases
from kernels.triton.configs import ARCHITECTURES, Architecture

CASES = [
    pytest.param(case, architecture, id=f"{case.name}-{architecture}")
    for case in cases()
    for architecture in ARCHITECTURES
    if architecture not in case.lacking
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("case", "architecture"), CASES)
def test_no_spills_wide_loads_the_right_instructions_and_no_more_bytes(case: Case, architecture: Architecture) -> None:
    stored = table.stored_bounds()
    rows = table.rows(case, architecture)
    assert rows
    assert {row.key: failures for row in rows if (failures := row.failures(stored.get(row.key)))} == {}


def test_every_stored_bound_belongs_to_a_case() -> None:
    known = {f"{architecture} | {case.name}" for case in cases() for architecture in ARCHITECTURES}
    stored = table.stored_bounds()
    assert {key.rsplit(" | ", 1)[0] for key in stored} <= known
    assert {key.split(" | ")[0] for key in stored} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"spills": 4}, "spills"),
        ({"shared_bytes": 10**6}, "shared memory"),
        ({"loads": Counter({4: 9})}, "no 128-bit loads"),
        ({"matrix": ("HMMA",)}, "no HGMMA, only HMMA"),
        ({"registers": 101}, "registers grew from 100 to 101"),
        ({"loops": (sass.Loop(Counter({"LDG.E.128": 3}), 128),)}, "loop_bytes grew from 4096 to 6144"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_each_limit_is_one(change: dict[str, object], complaint: str) -> None:
    good: dict[str, object] = {
        "registers": 100, "spills": 0, "shared_bytes": 1024, "matrix": ("HGMMA",), "loads": Counter({16: 2}),
        "instructions": 500, "loops": (sass.Loop(Counter({"LDGSTS.E.BYPASS.128": 2, "BRA": 1}), 128),),
    }  # fmt: skip

    def failures(resources: dict[str, object]) -> list[str]:
        row = table.Row("Llama-3-8B", "sm_90", "prefill_kernel", 4, 1, sass.Resources(**resources))  # type: ignore[arg-type]
        return row.failures({"registers": 100, "loop_bytes": 4096})

    assert failures(good) == []
    [found] = failures(good | change)
    assert complaint in found


LISTING = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_2:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/              @!P0 LDG.E.U16 R8, desc[UR4][R2.64] ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/               @P2 BRA `(.L_x_1) ;
.L_x_3:
        /*0070*/                   BRA `(.L_x_3);
"""


def test_only_innermost_loops_count_and_a_trap_is_none() -> None:
    [loop] = sass.innermost_loops(LISTING, threads=64)
    assert loop.loaded_bytes == 64 * (16 + 2)
    assert loop.matrix == 1
    assert loop.opcodes["BRA"] == 1


@pytest.mark.parametrize(
    ("opcode", "width"),
    [("LDG.E.128", 16), ("LDG.E.64.CONSTANT", 8), ("LDG.E", 4), ("LDG.E.U16", 2), ("LDGSTS.E.BYPASS.128", 16)],
)
def test_widths_of_memory_instructions(opcode: str, width: int) -> None:
    assert sass.width(opcode) == width


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [((7, 5), None), ((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90"), ((10, 0), "sm_100"), ((12, 0), "sm_80")],
)
def test_every_gpu_takes_a_row_that_fits_it(capability: tuple[int, int], architecture: str | None) -> None:
    assert architecture_of_capability(capability) == architecture
