"""What the driver is asked for, by a stand-in of its library; no kernel runs here."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from kernels.custom.compilers import find_cpp
from kernels.custom.cubin import CompiledKernel
from kernels.custom.launch import DeviceKernel, DriverError
from kernels.custom.resources import Image, Resources
from kernels.custom.signature import parse_signature

STAND_IN = r"""
#include <cstdint>
#include <cstring>
extern "C" {
struct Seen {
  int64_t loads, launches, blocks, threads, shared, allowed, stream, function, pointer;
  float number;
  int32_t size;
};
Seen seen = {};
int answer = 0;
int cuModuleLoadData(void** module, const void* image) {
  seen.loads++;
  *module = reinterpret_cast<void*>(11);
  return std::memcmp(image, "\x7f" "ELF\0cubin", 10) == 0 ? answer : 1;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = reinterpret_cast<void*>(0x1234567890ab);
  return module == reinterpret_cast<void*>(11) && std::strcmp(name, "_Z3own") == 0 ? 0 : 2;
}
int cuFuncSetAttribute(void*, int attribute, int value) {
  seen.allowed = attribute == 8 ? value : -1;
  return 0;
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                   unsigned shared, void* stream, void** arguments, void** extra) {
  if (y * z * b * c != 1 || extra != nullptr) return 3;
  seen.launches++;
  seen.blocks = x, seen.threads = a, seen.shared = shared;
  seen.stream = reinterpret_cast<int64_t>(stream), seen.function = reinterpret_cast<int64_t>(function);
  std::memcpy(&seen.pointer, arguments[0], 8);
  std::memcpy(&seen.size, arguments[2], 4);
  std::memcpy(&seen.number, arguments[3], 4);
  return 0;
}
int cuGetErrorString(int, const char** text) { *text = "the image is of another GPU"; return 0; }
}
"""


class Seen(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("loads", "launches", "blocks", "threads", "shared", "allowed", "stream")),
        ("function", ctypes.c_int64), ("pointer", ctypes.c_int64), ("number", ctypes.c_float), ("size", ctypes.c_int32),
    )  # fmt: skip


@pytest.fixture
def driver(tmp_path: Path) -> str:
    cpp = find_cpp()
    if cpp is None:
        pytest.skip("there is no C++ compiler")
    code, library = tmp_path / "driver.cpp", tmp_path / "driver.so"
    code.write_text(STAND_IN)
    subprocess.run([cpp, "-shared", "-fPIC", str(code), "-o", str(library)], check=True, timeout=60)
    return str(library)


def image() -> Image:
    kernel = CompiledKernel("_Z3own", ((0, 8),), 10, 0, 0)
    return Image("sm_90", b"\x7fELF\0cubin", kernel, Resources(10, 0, 0, 0))


def test_arguments_grid_and_stream_arrive(driver: str) -> None:
    kernel = DeviceKernel(image(), 100_000, driver)
    signature = parse_signature("const float x[*n], float y[*n], int n, float a")
    arguments = signature.arguments([0x7F0011223344, 0x7F0055667788], {"n": -5, "a": 0.25})
    for _ in range(2):
        kernel.launch_on(0, 0x7FAABBCCDDEE, 70_000, 256, arguments)
    seen = Seen.in_dll(ctypes.CDLL(driver), "seen")
    assert (seen.blocks, seen.threads, seen.shared, seen.allowed) == (70_000, 256, 100_000, 100_000)
    assert (seen.stream, seen.function) == (0x7FAABBCCDDEE, 0x1234567890AB)
    assert (seen.pointer, seen.size, seen.number) == (0x7F0011223344, -5, 0.25)
    assert (seen.loads, seen.launches) == (1, 2)
    kernel.launch_on(1, 0, 1, 1, arguments)
    assert seen.loads == 2  # once for each device


def test_a_refusal_is_told_in_the_drivers_words(driver: str) -> None:
    kernel = DeviceKernel(image(), 0, driver)
    ctypes.c_int.in_dll(ctypes.CDLL(driver), "answer").value = 209
    with pytest.raises(DriverError, match=r"_Z3own \(sm_90\): the image is of another GPU"):
        kernel.launch_on(0, 0, 1, 1, [])


def test_no_driver(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match=r"no CUDA driver: .*nothing\.so"):
        DeviceKernel(image(), 0, str(tmp_path / "nothing.so"))
