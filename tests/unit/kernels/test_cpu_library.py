from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from kernels.cpu import convert, library
from tests.unit.kernels.isas import every_isa, needs_library

LENGTHS = [*range(1, 34), 257]


def values(count: int, seed: int = 0) -> np.ndarray:
    """Numbers of every magnitude, with the ones that rounding gets wrong first."""
    generator = np.random.default_rng(seed)
    numbers = generator.standard_normal(count) * np.exp2(generator.integers(-30, 30, count))
    special = [0.0, -0.0, np.inf, -np.inf, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 65519.0, 65520.0, 6e-8, 2.9e-8, 3.1e-5]
    numbers[: len(special)] = special[:count]
    return numbers.astype(np.float32)


@every_isa()
@pytest.mark.parametrize("count", LENGTHS)
def test_bf16_and_back_as_torch_does_it(isa: str, count: int) -> None:
    numbers = values(count, count)
    expected = torch.from_numpy(numbers).to(torch.bfloat16)
    bits = convert.float_to_bf16(library.load(isa), numbers)
    np.testing.assert_array_equal(bits, expected.view(torch.uint16).numpy())
    np.testing.assert_array_equal(convert.bf16_to_float(library.load(isa), bits), expected.float().numpy())


@every_isa()
@pytest.mark.parametrize("count", LENGTHS)
def test_half_precision_and_back_as_numpy_does_it(isa: str, count: int) -> None:
    numbers = values(count, count)
    with np.errstate(over="ignore"):
        expected = numbers.astype(np.float16)
    bits = convert.float_to_f16(library.load(isa), numbers)
    np.testing.assert_array_equal(bits, expected.view(np.uint16))
    np.testing.assert_array_equal(convert.f16_to_float(library.load(isa), bits), expected.astype(np.float32))


@every_isa()
def test_every_half_precision_number_survives(isa: str) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    bits = bits[~np.isnan(bits.view(np.float16))]
    floats = convert.f16_to_float(library.load(isa), bits)
    np.testing.assert_array_equal(floats, bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(convert.float_to_f16(library.load(isa), floats), bits)


@every_isa()
def test_nan_stays_nan(isa: str) -> None:
    cpu, numbers = library.load(isa), np.full(19, np.nan, np.float32)
    assert np.isnan(convert.bf16_to_float(cpu, convert.float_to_bf16(cpu, numbers))).all()
    assert np.isnan(convert.f16_to_float(cpu, convert.float_to_f16(cpu, numbers))).all()
    assert np.isnan(convert.exponential(cpu, numbers)).all()


@every_isa()
def test_exponential_is_within_two_units_in_the_last_place(isa: str) -> None:
    numbers = np.linspace(-87, 88.7, 200_001, dtype=np.float32)
    expected = np.exp(numbers.astype(np.float64))
    error = np.abs(convert.exponential(library.load(isa), numbers) - expected) / np.spacing(expected.astype(np.float32))
    assert error.max() < 2


@every_isa()
def test_exponential_of_what_a_mask_and_an_overflow_leave(isa: str) -> None:
    numbers = np.array([-np.inf, -1e30, -110, 0, 89, 1e30, np.inf], np.float32)
    np.testing.assert_array_equal(convert.exponential(library.load(isa), numbers), [0, 0, 0, 1, np.inf, np.inf, np.inf])


@every_isa()
def test_wrong_types_and_strides_are_refused(isa: str) -> None:
    with pytest.raises(TypeError, match="takes float32, not float64"):
        convert.float_to_bf16(library.load(isa), np.zeros(4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not C-contiguous"):
        convert.float_to_bf16(library.load(isa), np.zeros((4, 4), np.float32)[:, ::2])


def test_an_unknown_instruction_set_is_refused_with_the_known_ones() -> None:
    library.available()
    with pytest.raises(library.Unavailable, match="choose one of amx, avx512, avx2, portable"):
        library.load("sse9")


@every_isa()
def test_the_environment_chooses_the_instruction_set(isa: str) -> None:
    program = "from kernels.cpu import library; print(library.load().isa)"
    environment = {**os.environ, "HEADRACE_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == isa


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    monkeypatch.setattr(library, "LIBRARY", type(library.LIBRARY)(tmp_path) / "headrace_cpu.so")
    with pytest.raises(library.Unavailable, match="Install g\\+\\+"):
        library._open.__wrapped__()


@every_isa()
def test_a_team_closes_twice_and_refuses_no_threads(isa: str) -> None:
    team = library.Team(library.load(isa), 3)
    team.close()
    team.close()
    assert not team.handle
    with pytest.raises(ValueError, match="at least one thread"):
        library.Team(library.load(isa), 0)


@needs_library
def test_more_threads_than_the_system_starts_are_refused_and_those_started_end() -> None:
    """An exception of the library's would end the process. Fewer threads work afterwards."""
    program = """
import resource, threading
from kernels.cpu.library import Team, load
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
try:
    Team(load(), 1000)
except RuntimeError as error:
    print(error)
with open("/proc/self/status") as status:
    print([line.split()[1] for line in status if line.startswith("Threads")])
with Team(load(), 2):
    print("two")
"""
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert run.stdout.splitlines() == [
        "this process can't start 1000 threads: ask for fewer, or allow it more",
        "['1']",
        "two",
    ], run.stderr


def test_importing_the_package_loads_neither_torch_nor_the_library() -> None:
    program = (
        "import sys; from kernels.cpu import library; print('torch' in sys.modules, library._open.cache_info()[-1])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "0"]


def test_a_library_of_other_sources_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
    with pytest.raises(library.Unavailable, match="built from other sources"):
        library._open.__wrapped__()
