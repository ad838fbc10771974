"""Which implementation serves a device."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from kernels.protocol import Kernels
from kernels.reference import ReferenceKernels


def get_kernels(device: torch.device, kv_dtype: torch.dtype | None = None) -> Kernels:
    """The fastest implementation that there is for `device`: on a GPU the Triton kernels, if they can run there.

    Keys and values are quantised to `kv_dtype`; None keeps them in the model's own type.
    """
    if device.type == "cuda" and find_spec("triton") is not None:
        from kernels.triton.architecture import architecture_of
        from kernels.triton.kernels import TritonKernels

        architecture = architecture_of(device)
        if architecture is not None:
            return TritonKernels(architecture, kv_dtype)
    return ReferenceKernels(device, kv_dtype)
