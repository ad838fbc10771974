"""Compiles the kernels through their real launch path for GPUs that this machine doesn't have.

Inside `compiling(target)` every launch specialises on its arguments and compiles as it would on that GPU, and
nothing runs. Arguments are meta tensors, so the host code that chooses blocks and grids is what users run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.triton.configs import Architecture

TARGETS: dict[Architecture, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class NoDevice(DriverBase):  # type: ignore[misc]
    """A driver of a GPU that isn't there."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> Callable[..., Any]:
        raise RuntimeError("nothing can be timed without a GPU")

    def get_current_device(self) -> str:
        return str(self._target)  # only a key, which keeps one cache of kernels for each target

    def set_current_device(self, device: Any) -> None:
        pass

    def get_current_stream(self, device: Any) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as a launch would have it."""

    name: str
    warps: int
    stages: int
    shared_bytes: int
    asm: dict[str, Any]
    """By stage: `cubin` and `ptx` of NVIDIA's, `amdgcn` of AMD's."""


@contextmanager
def compiling(architecture: Architecture) -> Iterator[list[Compiled]]:
    """Collect what the launches inside compile to."""
    found: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        metadata = kernel.metadata
        found.append(Compiled(self.__name__, metadata.num_warps, metadata.num_stages, metadata.shared, kernel.asm))
        return kernel

    before = driver._active
    driver.set_active(NoDevice(TARGETS[architecture]))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run
        driver._active = before
