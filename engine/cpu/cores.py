"""How many threads this process should compute with."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cpus: Path = _CPUS, cgroups: Path = _CGROUPS) -> int:
    """Physical cores that this process may run on, and no more than its control group's quota of processor time.

    Two threads on one core only share its arithmetic, and threads past the quota would all be stopped
    together while they wait for each other.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = len({_siblings(cpus, cpu) for cpu in allowed})
    quota = min((_quota(group / "cpu.max") for group in _groups(cgroups)), default=math.inf)
    return max(1, min(cores, math.floor(quota) if quota < math.inf else cores))


def _siblings(cpus: Path, cpu: int) -> str:
    """The same for all logical processors of one core."""
    try:
        return (cpus / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _groups(root: Path) -> list[Path]:
    """The directories of this process's control group and those above it."""
    try:
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return [root]
    group = root / own.removeprefix("0::").lstrip("/")
    return [group, *(parent for parent in group.parents if parent.is_relative_to(root))]


def _quota(file: Path) -> float:
    """Cores' worth of time that a control group gives; `max 100000` is no limit."""
    try:
        limit, period = file.read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return math.inf
