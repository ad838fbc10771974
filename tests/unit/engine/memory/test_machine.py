"""The limits that hold for a process, read from made-up system files and from this machine's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.memory.machine import DeviceMemory, host_memory, machine_bytes, resident_bytes, take_peak_bytes

MiB = 2**20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 1000 MiB with 600 available and 50 used by this process, without any cgroup."""
    put(tmp_path / "proc/meminfo", f"MemTotal: {1000 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {600 * 1024} kB\n")
    put(tmp_path / "proc/self/status", f"Name:\tpython\nVmHWM:\t{70 * 1024} kB\nVmRSS:\t {50 * 1024} kB\n")
    return tmp_path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_process_has_what_it_uses_and_what_is_available(root: Path) -> None:
    assert host_memory(root) == DeviceMemory(650 * MiB, 50 * MiB)
    assert host_memory(root).free_bytes == 600 * MiB
    assert machine_bytes(root) == 1000 * MiB


def test_a_limit_of_the_process_itself_counts(root: Path) -> None:
    """`ulimit -v` counts addresses, those that were reserved and never written too."""
    put(root / "proc/self/status", f"VmSize:\t{300 * 1024} kB\nVmRSS:\t {50 * 1024} kB\n")
    put(
        root / "proc/self/limits",
        f"Max cpu time unlimited unlimited\nMax address space         {450 * MiB} unlimited bytes\n",
    )
    assert host_memory(root) == DeviceMemory(200 * MiB, 50 * MiB)
    assert machine_bytes(root) == 450 * MiB
    put(root / "proc/self/limits", "Max address space         unlimited            unlimited            bytes\n")
    assert host_memory(root).free_bytes == 600 * MiB


def test_the_tightest_cgroup_above_the_process_counts(root: Path) -> None:
    put(root / "proc/self/cgroup", "0::/pods/one\n")
    top = root / "sys/fs/cgroup"
    put(top / "pods/memory.max", str(400 * MiB))
    put(top / "pods/memory.current", str(250 * MiB))
    put(top / "pods/memory.stat", f"anon 5\ninactive_file {30 * MiB}\n")
    put(top / "pods/one/memory.max", "max\n")
    assert host_memory(root).free_bytes == 180 * MiB
    assert machine_bytes(root) == 400 * MiB
    put(top / "pods/one/memory.max", str(100 * MiB))
    put(top / "pods/one/memory.current", str(90 * MiB))
    assert host_memory(root).free_bytes == 10 * MiB
    assert machine_bytes(root) == 100 * MiB


def test_a_group_over_its_limit_leaves_nothing(root: Path) -> None:
    put(root / "proc/self/cgroup", "0::/\n")
    put(root / "sys/fs/cgroup/memory.max", str(10 * MiB))
    put(root / "sys/fs/cgroup/memory.current", str(20 * MiB))
    assert host_memory(root).free_bytes == 0


def test_the_first_version_of_cgroups(root: Path) -> None:
    put(root / "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/box\n0::/\n")
    top = root / "sys/fs/cgroup/memory"
    put(top / "memory.limit_in_bytes", str(2**63 - 4096))
    put(top / "box/memory.limit_in_bytes", str(300 * MiB))
    put(top / "box/memory.usage_in_bytes", str(200 * MiB))
    put(top / "box/memory.stat", f"inactive_file 1\ntotal_inactive_file {20 * MiB}\n")
    assert host_memory(root).free_bytes == 120 * MiB


def test_a_system_that_tells_nothing_gets_half_of_its_memory(tmp_path: Path) -> None:
    memory = host_memory(tmp_path)
    assert memory.used_bytes == 0
    assert memory.free_bytes == machine_bytes(tmp_path) // 2


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads this process's own memory from /proc")
def test_the_peak_of_this_process_is_seen_once() -> None:
    take_peak_bytes()
    before = resident_bytes()
    np.ones(64 * MiB, np.uint8)
    assert take_peak_bytes() - before > 60 * MiB
    assert take_peak_bytes() - resident_bytes() < 30 * MiB
    assert 0 < before < host_memory().total_bytes <= machine_bytes() + before
