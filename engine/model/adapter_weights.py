"""Adapters as their device has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.model.adapter import Adapter, stack
from kernels.adapters import Adapters


def build_adapters(
    adapters: Sequence[Adapter], names: Sequence[str], widths: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Adapters | None:
    """What the adapters add to the joined matrices of these canonical names and outputs; None if that is nothing."""
    stacked = stack(adapters, names, widths)
    if stacked is None:
        return None
    shrink, expand = (torch.from_numpy(part).to(device, dtype) for part in stacked)
    return Adapters.of(shrink, expand, widths)
