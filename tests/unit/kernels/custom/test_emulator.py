"""What a kernel must not do is caught where it does it; the process lives on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.custom import CustomOp, EmulationError
from tests.unit.kernels.custom.conftest import Make
from tests.unit.kernels.custom.sources import ELEMENTS

pytestmark = pytest.mark.usefixtures("on_cpu_alone")

V = torch.arange(256.0)


@pytest.mark.parametrize(
    ("body_text", "error"),
    [
        ("y[i + 1] = x[i];", r"own\.cu:3: thread 255 of block 0 wrote element 256 of y, which has 256"),
        ("y[i] = x[i + 1];", r"own\.cu:3: thread 255 of block 0 read element 256 of x, which has 256"),
        ("y[i - 1] = x[i];", r"own\.cu: own wrote element -1 of y, which has 256"),
        ("y[i * 100000] = 1;", r"thread 1 of block 0 wrote element 100000 of y, which has 256"),
        ("y[i - 2147483647 - 1] = 1;", r"thread 0 of block 0 wrote element -2147483648 of y, which has 256"),
        ("((float*)x)[i] = 1;", r"thread 0 of block 0 wrote to x, which the signature says is only read"),
        ("*(int*)8 = 3;", r"thread 0 of block 0 wrote an address that is in none of its tensors"),
        (
            "__shared__ float s[16]; s[threadIdx.x] = 1; y[i] = s[0];",
            r"thread 16 of block 0 did what has no meaning, such as an index outside of an array",
        ),
        (
            "float v[9]; for (int k = 0; k <= n; k++) v[k] = x[0]; y[i] = v[n % 9];",
            r"such as an index outside of an array",
        ),
        ("float v[99999]; for (int k = 0; k < n; k++) v[k * 9] = x[k]; y[i] = v[i];", r"past the 256 KiB"),
        ("if (i < 9) __syncthreads(); else {\n __syncthreads();\n} y[i] = 1;", r"never meet: .*line 3 and line 4"),
        ("if (i < 9) __syncwarp(); y[i] = 1;\n if (i > 8) __syncthreads();", r"block 0 never meet"),
    ],
)
def test_what_must_not_be(body: Make, body_text: str, error: str) -> None:
    with pytest.raises(EmulationError, match=error):
        body(body_text)(V)


def test_a_block_far_along_is_named(body: Make) -> None:
    with pytest.raises(EmulationError, match=r"thread 31 of block 7 wrote element 256 of y"):
        body("y[i + (i == n - 1)] = x[i];", threads=32)(V)


def test_a_write_into_the_few_bytes_behind_a_tensor(body: Make) -> None:
    with pytest.raises(EmulationError, match=r"wrote element 5 of y, which has 5"):
        body("if (i <= n) y[i] = 1;")(V[:5])


def test_dynamic_shared_memory_has_an_end(body: Make) -> None:
    text = "extern __shared__ float s[]; s[threadIdx.x] = x[i]; __syncthreads(); y[i] = s[255 - threadIdx.x];"
    assert torch.equal(body(text, shared_bytes=1024)(V), V.flip(0))
    with pytest.raises(EmulationError, match=r"wrote byte 1008 of the dynamic shared memory, which has 1000"):
        body(text, shared_bytes=1000)(V)


@pytest.mark.parametrize(
    "value",
    ["i / (int)threadIdx.x", "i % (unsigned)x[i]", "i / (n - n)", "(-2147483647 - n / 256) / ((int)x[i] - 1)"],
    ids=["quotient", "remainder", "seen by the compiler", "the lowest by -1"],
)
def test_a_division_of_integers_without_a_result_is_told(body: Make, value: str) -> None:
    told = r"own\.cu:3: thread 0 of block 0 divided an integer by zero, or the lowest one by -1"
    bad = body(f"y[i] = x[i] + {value};")
    for _ in range(3):
        with pytest.raises(EmulationError, match=told):
            bad(V)


def test_a_trap_is_told_for_what_it_is(body: Make) -> None:
    with pytest.raises(EmulationError, match=r"thread 3 of block 0 did what has no meaning"):
        body("if (i == 3) __builtin_trap(); y[i] = 1;")(V)


@pytest.mark.parametrize("include", ["", "#undef assert\n#include <assert.h>\n"])
def test_an_assertion_that_fails_is_told(tmp_path: Path, include: str) -> None:
    path = tmp_path / "asserting.cu"
    path.write_text(include + ELEMENTS % "assert(i != 7 && i >= 0); y[i] = x[i];")
    told = r"asserting.cu:\d+: thread 7 of block 0 failed its assertion: i != 7 && i >= 0"
    with pytest.raises(EmulationError, match=told):
        CustomOp(path)(V)


LIMITED = """import resource, sys, torch
from kernels.custom import CustomOp, EmulationError, op
op.find_compiler = lambda: None
own = CustomOp(sys.argv[1])
with open("/proc/self/statm") as held:
    used = int(held.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), -1))
try:
    own(torch.zeros(256))
except EmulationError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_process_with_few_addresses_has_smaller_guards(tmp_path: Path) -> None:
    path = tmp_path / "own.cu"
    path.write_text(ELEMENTS % "y[i + 10000000] = 1;")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)],
        cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "wrote element 10000000 of y" in done.stdout


def test_what_isnt_written_is_no_number(body: Make) -> None:
    assert body("if (i % 2) y[i] = x[i];")(V).isnan().sum() == 128


def test_warps_vote_shuffle_and_add(body: Make) -> None:
    text = """unsigned odd = __ballot_sync(~0u, i % 2);
    float up = __shfl_up_sync(~0u, x[i], 1), down = __shfl_down_sync(~0u, x[i], 1, 16);
    float first = __shfl_sync(~0u, x[i], 0);
    __shared__ int count; if (threadIdx.x == 0) count = 0; __syncthreads();
    atomicAdd(&count, 1); __syncthreads();
    y[i] = (odd == 0xaaaaaaaau) + 10 * up + 1e4f * down + 1e7f * first + count * 1e-3f;"""
    lanes = torch.arange(32.0)
    up = torch.cat([lanes[:1], lanes[:-1]])
    down = torch.where(lanes % 16 == 15, lanes, lanes + 1)
    assert torch.allclose(body(text, threads=32)(lanes), 1 + 10 * up + 1e4 * down + 32e-3)


def test_threads_that_have_ended_hold_nobody_up(body: Make) -> None:
    text = "if (i >= 40) return; float v = x[i]; __syncthreads(); y[i] = v;"
    assert torch.equal(body(text)(V)[:40], V[:40])


def test_after_many_faults_all_goes_on(body: Make) -> None:
    bad, good = body("y[i + n] = 1;"), body("y[i] = x[i];")
    for _ in range(50):
        with pytest.raises(EmulationError):
            bad(V)
    assert torch.equal(good(V), V)


CRASH = """import ctypes, sys, torch
from kernels.custom import CustomOp, EmulationError, op
op.find_compiler = lambda: None
try:
    CustomOp(sys.argv[1])(torch.zeros(256))
except EmulationError:
    print("caught", flush=True)
ctypes.string_at(8)
"""


@pytest.mark.slow
def test_a_fault_of_the_process_itself_still_ends_it(tmp_path: Path) -> None:
    """The handlers are gone when the kernel has ended: a real bad access isn't swallowed."""
    path = tmp_path / "own.cu"
    path.write_text(ELEMENTS % "y[i + n] = 1;")
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(path)],
        cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "caught\n"
    assert done.returncode == -signal.SIGSEGV
