"""The compilers that are there agree; each is tried where it is installed."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.custom import CompileFailed, compilers
from kernels.custom.compilers import Nvcc, Nvrtc, find_compiler, first_error
from kernels.custom.resources import Resources, make_image
from tests.unit.kernels.custom.sources import ELEMENTS, SILU_AND_MUL, SPILLS


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> Nvrtc:
    """NVRTC as it is found on a machine without a toolkit."""
    monkeypatch.setattr(compilers, "find_nvcc", lambda: None)
    found = find_compiler()
    if found is None:
        if platform.machine() == "x86_64":
            pytest.fail("the development dependencies bring NVRTC along")
        pytest.skip("NVRTC isn't installed")
    assert isinstance(found, Nvrtc)
    return found


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_source(text: str) -> Path:
        path = tmp_path / "own.cu"
        path.write_text(text)
        return path

    return write_source


def test_nvrtc_reports_what_nvcc_does(
    nvrtc: Nvrtc, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(SPILLS)
    by_nvrtc = make_image("sm_90", nvrtc.compile(path, "sm_90", ()), "own", 64)
    assert by_nvrtc.resources.registers == 32
    assert by_nvrtc.resources.spill_bytes > 0
    assert by_nvrtc.kernel.parameters == ((0, 8), (8, 8), (16, 4))
    assert by_nvrtc.kernel.symbol == "_Z3ownPKfPfi"
    monkeypatch.undo()
    nvcc = find_compiler()
    if not isinstance(nvcc, Nvcc):
        pytest.skip("nvcc isn't installed")
    by_nvcc = make_image("sm_90", nvcc.compile(path, "sm_90", ()), "own", 64)
    assert by_nvcc.kernel.parameters == by_nvrtc.kernel.parameters
    assert isinstance(by_nvcc.resources, Resources)
    assert by_nvcc.resources.registers == by_nvrtc.resources.registers


def test_nvrtc_finds_cudas_headers(nvrtc: Nvrtc, write: Callable[[str], Path]) -> None:
    if not list(compilers.cuda_includes()):
        pytest.skip("no wheel here has CUDA's headers")
    image = make_image("sm_80", nvrtc.compile(write(SILU_AND_MUL), "sm_80", ()), "silu_and_mul", 0)
    assert image.kernel.parameters == ((0, 8), (8, 8), (16, 4))


def test_nvrtc_tells_the_line(nvrtc: Nvrtc, write: Callable[[str], Path]) -> None:
    with pytest.raises(CompileFailed, match=r'^own\.cu\(3\): error: identifier "z" is undefined'):
        nvrtc.compile(write(ELEMENTS % "y[i] = z;"), "sm_90", ())


def test_an_architecture_that_isnt_one(nvrtc: Nvrtc, write: Callable[[str], Path]) -> None:
    with pytest.raises(CompileFailed, match=r"own\.cu: .*invalid value for --gpu-architecture"):
        nvrtc.compile(write(ELEMENTS % "y[i] = 1;"), "sm_9", ())


def test_the_first_error_of_a_log() -> None:
    path = Path("/somewhere/own.cu")
    log = "/somewhere/own.cu(1): warning: x\n/somewhere/own.cu(2): error: y\n/somewhere/own.cu(3): error: z"
    assert first_error(log, path) == "own.cu(2): error: y"
    ptxas = "ptxas error   : Entry function 'own' uses too much shared data (0x10000 bytes, 0xc000 max)"
    assert first_error(ptxas, path) == f"own.cu: {ptxas}"
    assert first_error("all is well", path) is None
