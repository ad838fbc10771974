from __future__ import annotations

from pathlib import Path

import pytest

from kernels.custom import SourceError
from kernels.custom.source import DeclaredParameter, read_source

TWO = """// __global__ void no(int* x) {}
/* __global__ void neither(int* x) {} */
template <typename T> __global__ void any(T* x) {}
__global__ void later(int* x);
extern "C" __global__ void __launch_bounds__(128, 2) first(const float* __restrict__ x, std::int64_t n) {}
static __global__ void second(void) {}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "own.cu"
    path.write_text(text)
    return path


def test_kernels_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, TWO)
    assert read_source(path, "first").kernel.parameters == (
        DeclaredParameter("float", "x", pointer=True, const=True),
        DeclaredParameter("std::int64_t", "n", pointer=False, const=False),
    )
    assert read_source(path, "second").kernel.parameters == ()


@pytest.mark.parametrize(
    ("text", "kernel", "error"),
    [
        (TWO, None, r"own\.cu: it defines several kernels: choose one by .*kernel=.* of first, second"),
        (TWO, "third", r"own\.cu: it defines no kernel third, but first, second"),
        (TWO, "any", r"own\.cu: any is a template"),
        ("int x;", None, r"own\.cu: it defines no kernel: a kernel is a __global__ void"),
        ("int x;", "f", r"own\.cu: it defines no kernel f, but none at all"),
    ],
)
def test_none_or_several(tmp_path: Path, text: str, kernel: str | None, error: str) -> None:
    with pytest.raises(SourceError, match=error):
        read_source(write(tmp_path, text), kernel)


def test_a_file_that_isnt_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"none\.cu can't be read"):
        read_source(tmp_path / "none.cu", None)


def test_dynamic_shared_memory_becomes_a_pointer(tmp_path: Path) -> None:
    path = write(tmp_path, "__global__ void f(int* x) {\n  extern __shared__ __align__(16) unsigned char s[];\n}")
    assert "unsigned char*& s = headrace::dynamic_shared<unsigned char>();" in read_source(path, None).host_text
