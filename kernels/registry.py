"""Which implementation serves a device."""

from __future__ import annotations

import torch

from kernels.protocol import Kernels
from kernels.reference import ReferenceKernels


def get_kernels(device: torch.device) -> Kernels:
    """The fastest implementation that there is for `device`."""
    return ReferenceKernels(device)
