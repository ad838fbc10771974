"""Which implementation serves a device."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Literal

import torch

from kernels.protocol import Kernels
from kernels.reference import ReferenceKernels

KernelChoice = Literal["auto", "torch", "triton"]


def get_kernels(device: torch.device, kv_dtype: torch.dtype | None = None, choice: KernelChoice = "auto") -> Kernels:
    """The implementation that is asked for: `auto` is Triton's on a GPU, if they can run there, else torch's.

    Keys and values are quantised to `kv_dtype`; None keeps them in the model's own type. Raises ValueError if Triton's
    kernels are asked for by name and can't run. On a CPU Triton interprets them if TRITON_INTERPRET=1 was in the
    environment from the start, a thousand times slower: to look into them, and for tests.
    """
    if choice == "triton" or (choice == "auto" and device.type == "cuda"):
        obstacle = _obstacle(device)
        if obstacle is None:
            return _triton(device, kv_dtype)
        if choice == "triton":
            raise ValueError(f"kernels='triton' can't be had: {obstacle}. Set kernels to auto or torch")
    return ReferenceKernels(device, kv_dtype)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _obstacle(device: torch.device) -> str | None:
    """Why Triton's kernels can't run; None if they can."""
    if find_spec("triton") is None:
        return "Triton isn't installed ('make install' in a checkout, or the extra 'gpu', brings it)"
    if device.type == "cuda":
        from kernels.triton.architecture import architecture_of

        known = architecture_of(device) is not None
        return None if known else "this GPU is older than NVIDIA's compute capability 8.0, or no gfx942 of AMD's"
    return None if _interpreted() else f"the device is {device}, and they need a GPU"


def _triton(device: torch.device, kv_dtype: torch.dtype | None) -> Kernels:
    from kernels.triton.architecture import architecture_of
    from kernels.triton.kernels import TritonKernels

    if _interpreted():
        from kernels.triton.checks import interpreter

        interpreter.install()
    architecture = architecture_of(device) if device.type == "cuda" else "sm_90"
    assert architecture is not None
    return TritonKernels(architecture, kv_dtype)
