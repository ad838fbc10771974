"""The benchmark itself, on little work and without peers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.peers.place import ROOT
from bench.ratios import RATIOS

SCRIPT = [sys.executable, str(ROOT / "bench" / "engine.py")]


def test_it_runs_as_a_script_from_anywhere(tmp_path: Path) -> None:
    done = subprocess.run([*SCRIPT, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--only" in done.stdout


def test_an_unknown_part_is_told(tmp_path: Path) -> None:
    done = subprocess.run([*SCRIPT, "--only", "w9"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "there is no part w9" in done.stderr


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
def test_every_part_runs_and_is_recorded(tmp_path: Path) -> None:
    done = subprocess.run(
        [*SCRIPT, "--quick", "--sides", "headrace-bf16", "--out", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=890,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out" not in done.stdout
    found = json.loads((tmp_path / "results.json").read_text())
    assert set(found["parts"]) == {"w1", "w2", "w3", "start", "jobs", "stall", "online", "sweep", "naive"}
    for name, part in found["parts"].items():
        assert part["sides"], f"nobody took part in {name}"
        for side, result in part["sides"].items():
            assert result["samples"], f"{side} did nothing in {name}"
            assert result["versions"], side
            assert result["settings"], side
            assert all(value >= 0 for sample in result["samples"] for value in sample.values())
    assert found["parts"]["w1"]["sides"]["headrace-bf16"]["samples"][0]["tokens_per_s"] > 1
    alone = {"w1_jobs_vs_engine", "itl_p99_capped_vs_uncapped", "jobs_vs_naive_worker"}
    assert {ratio.key for ratio in RATIOS} & set(found) == alone
    page = (tmp_path / "RESULTS.md").read_text()
    for heading in ("W1: ", "W2: ", "W3: ", "Start", "W1 as jobs", "While long", "Online", "A decode step", "Against"):
        assert f"\n## {heading}" in page
