"""Every implementation of the kernels runs the same tests: add it to the parameters of `kernels`."""

from __future__ import annotations

import pytest
import torch

from kernels.protocol import Kernels
from kernels.reference import ReferenceKernels


@pytest.fixture(params=["reference"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return {"reference": ReferenceKernels(torch.device("cpu"))}[request.param]
