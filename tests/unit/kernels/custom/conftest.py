from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kernels.custom import CustomOp, op
from kernels.custom.compilers import find_compiler, find_cpp
from tests.unit.kernels.custom.sources import ELEMENTS

Make = Callable[..., CustomOp]


@pytest.fixture(scope="session")
def made() -> dict[Any, CustomOp]:
    """Operations by their source, their options, and the compilers that there seemed to be."""
    return {}


@pytest.fixture
def make(tmp_path: Path, made: dict[Any, CustomOp]) -> Make:
    """`make(text, **options)`: an operation from a source, compiled for one architecture."""

    def make_op(text: str, **options: Any) -> CustomOp:
        options = {"architectures": ("sm_90",)} | options
        key = (text, tuple(sorted(options.items())), op.find_compiler() is None, op.find_cpp() is None)
        if key not in made:
            path = tmp_path / "own.cu"
            path.write_text(text)
            made[key] = CustomOp(path, **options)
        return made[key]

    return make_op


@pytest.fixture
def body(make: Make) -> Make:
    """`body(text)`: an operation over elements of x and y, n of them, whose body for element i is `text`, on line 3."""
    return lambda text, **options: make(ELEMENTS % text, **options)


@pytest.fixture
def on_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were no CUDA compiler, which saves its time where it doesn't matter."""
    if find_cpp() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(op, "find_compiler", lambda: None)


@cache
def has_cuda_compiler() -> bool:
    return find_compiler() is not None


@pytest.fixture
def cuda_compiler() -> None:
    if not has_cuda_compiler():
        pytest.skip("there is neither nvcc nor NVRTC")
