"""Which row of the tables in `kernels.triton.configs` a GPU takes."""

from __future__ import annotations

import torch

from kernels.triton.configs import Architecture


def architecture_of(device: torch.device) -> Architecture | None:
    """The architecture of a CUDA or ROCm device; None if the kernels don't run there."""
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return "gfx942" if name.startswith(("gfx94", "gfx95")) else None
    return architecture_of_capability(torch.cuda.get_device_capability(device))


def architecture_of_capability(capability: tuple[int, int]) -> Architecture | None:
    """NVIDIA's compute capability, to the newest row that fits: 8.6, 8.9 and 12.x have the least shared memory."""
    major, _ = capability
    if major < 8:
        return None
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")  # type: ignore[return-value]
