"""Every implementation of the kernels runs the same tests: add it to the parameters of `kernels`.

Triton's runs in the interpreter, which a process has from its start or not at all: with TRITON_INTERPRET=1 in the
environment it is the only one, else it is left out. `triton/test_interpreted.py` starts such processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from kernels.cpu import library
from kernels.cpu.kernels import CpuKernels
from kernels.cpu.library import Team
from kernels.protocol import Kernels
from kernels.reference import ReferenceKernels


@pytest.fixture(scope="session")
def team() -> Iterator[Team]:
    """Two threads on the best instruction set of this machine."""
    try:
        best = library.load()
    except library.Unavailable as error:
        pytest.skip(str(error))
    with Team(best, 2) as team:
        yield team


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["triton"] if INTERPRETED else ["reference", "cpu"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    if request.param == "triton":
        from kernels.triton.checks import interpreter, sanitizer
        from kernels.triton.kernels import TritonKernels

        interpreter.install()
        with sanitizer.sanitized():
            yield TritonKernels("sm_90")
    elif request.param == "cpu":
        yield CpuKernels(request.getfixturevalue("team"))
    else:
        yield ReferenceKernels(torch.device("cpu"))


Quantising = Callable[[torch.dtype | None], Kernels]


@pytest.fixture(params=["reference", "cpu"])
def quantising(request: pytest.FixtureRequest) -> Quantising:
    """Implementations by the type that they keep keys and values in. Triton's are tested in `triton/interpreted`."""
    if request.param == "reference":
        return partial(ReferenceKernels, torch.device("cpu"))
    return partial(CpuKernels, request.getfixturevalue("team"))
