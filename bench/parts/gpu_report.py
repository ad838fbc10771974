"""What a check of a GPU found, as lines of a table."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Line:
    """One finding. `share` is of what was measured as the most that the machine does."""

    part: str
    name: str
    value: float
    unit: str
    share: float | None = None
    failed: bool = False


def machine(device: torch.device) -> str:
    """The versions and the GPU."""
    import triton

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU, interpreted"
    return f"{gpu} · torch {torch.__version__} · triton {triton.__version__} · Python {platform.python_version()}"


def table(lines: Sequence[Line]) -> str:
    """Aligned columns, one line for each finding."""
    rows = [f"{'part':12} {'what':44} {'value':>12} {'unit':18} {'of the most':>11}"]
    for line in lines:
        share = "" if line.share is None else f"{100 * line.share:.0f} %"
        verdict = "  WRONG" if line.failed else ""
        rows.append(f"{line.part:12} {line.name:44} {line.value:12.4g} {line.unit:18} {share:>11}{verdict}")
    return "\n".join(rows)
