"""What the host's memory has left for this process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class DeviceMemory(NamedTuple):
    """The memory of a device as one process sees it."""

    total_bytes: int
    """What there is; on a host, what this process has and could still get."""
    used_bytes: int
    """What is taken of it."""

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


def host_memory(root: Path = ROOT) -> DeviceMemory:
    """The host's memory within every limit that holds for this process: the machine's, its cgroups' and its own."""
    used = resident_bytes(root)
    free = min([_available_bytes(root), *_cgroup_free_bytes(root)])
    addresses = _most_address_bytes(root)
    if addresses is not None:
        free = min(free, addresses - _status(root, "VmSize"))
    return DeviceMemory(used + max(free, 0), used)


def machine_bytes(root: Path = ROOT) -> int:
    """All memory that this process could ever have: the machine's, or the least limit of its cgroups and its own."""
    limits = [limit for limit, _ in _cgroups(root)]
    addresses = _most_address_bytes(root)
    if addresses is not None:
        limits.append(addresses)
    return min([_meminfo(root, "MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *limits])


def resident_bytes(root: Path = ROOT) -> int:
    """Memory that this process has now; 0 where the system doesn't tell."""
    return _status(root, "VmRSS")


def take_peak_bytes(root: Path = ROOT) -> int:
    """The most memory that this process has had since the last call, where the system counts it; else what it has."""
    peak = _status(root, "VmHWM")
    try:
        (root / "proc/self/clear_refs").write_text("5")  # resets VmHWM
    except OSError:
        return resident_bytes(root)
    return peak


def trim_heap() -> None:
    """Have the C library give the system what has been freed, where it can be asked to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _available_bytes(root: Path) -> int:
    available = _meminfo(root, "MemAvailable")
    return available or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _most_address_bytes(root: Path) -> int | None:
    """The limit of this process's addresses (`ulimit -v`), which memory counts against; None if there is none."""
    try:
        lines = (root / "proc/self/limits").read_text().splitlines()
    except OSError:
        return None
    soft = next((line.split()[3] for line in lines if line.startswith("Max address space")), "unlimited")
    return int(soft) if soft.isdigit() else None


def _meminfo(root: Path, name: str) -> int:
    return _field(root / "proc/meminfo", name)


def _status(root: Path, name: str) -> int:
    return _field(root / "proc/self/status", name)


def _field(path: Path, name: str) -> int:
    """A line `name: 123 kB`, in bytes; 0 if there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def _cgroup_free_bytes(root: Path) -> Iterator[int]:
    """What each limit leaves; file pages that could be dropped count as free."""
    for limit, directory in _cgroups(root):
        name = "memory.current" if (directory / "memory.current").exists() else "memory.usage_in_bytes"
        used = _number(directory / name) or 0
        try:
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            stat = {}
        yield limit - used + int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _cgroups(root: Path) -> Iterator[tuple[int, Path]]:
    """Limits in bytes, and the directories of the groups that have them: this process's and all above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            directory = top.joinpath(*parts[:depth])
            limit = _number(directory / name)
            if limit is not None and limit < 2**60:
                yield limit, directory


def _number(path: Path) -> int | None:
    """A file's number; None if it isn't there or says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
