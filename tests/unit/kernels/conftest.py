"""Every implementation of the kernels runs the same tests: add it to the parameters of `kernels`."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture(params=["reference", "cpu"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "cpu":
        return CpuKernels(request.getfixturevalue("team"))
    return ReferenceKernels(torch.device("cpu"))
