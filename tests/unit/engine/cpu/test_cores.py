from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.cpu.cores import usable_cores


@pytest.fixture
def cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """8 logical processors on 4 cores, 6 of them allowed, which are 3 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 4, 5, 6})
    for cpu in range(8):
        topology = tmp_path / f"cpus/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path / "cpus"


def test_two_threads_of_a_core_count_once(cpus: Path, tmp_path: Path) -> None:
    assert usable_cores(cpus, tmp_path / "none") == 3


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000", 3),
        ("200000 100000", 2),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("900000 100000", 3),
        ("?", 3),
    ],
)
def test_no_more_than_the_quota(cpus: Path, tmp_path: Path, quota: str, expected: int) -> None:
    groups = tmp_path / "groups"
    groups.mkdir()
    (groups / "cpu.max").write_text(quota)
    assert usable_cores(cpus, groups) == expected


def test_a_system_that_says_nothing_of_its_topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 3})
    assert usable_cores(tmp_path, tmp_path) == 2
