"""The script for a GPU, on a machine that has none: it runs to its end, and says so when a kernel is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench import gpu_check
from bench.parts.gpu_report import Line, table

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton for this machine")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs_interpreted(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench/gpu_check.py"), "--device", "cpu", "--tiny"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=580,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    for expected in (
        "attention 128",
        "float8_e4m3fn KV",
        "int4 by 64 weights",
        "page copy",
        "adapters",
        "sampling, ",
        "greedy, graphs and overlap",
        "greedy, neither",
    ):
        assert expected in done.stdout
    assert "WRONG" not in done.stdout


def test_without_triton_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as left:
        gpu_check.main([])
    assert left.value.code == 1
    assert "make install" in capsys.readouterr().err


def test_a_wrong_kernel_stands_out() -> None:
    lines = [Line("correct", "a", 0.001, "relative error"), Line("correct", "b", 0.5, "relative error", failed=True)]
    lines.append(Line("speed", "c", 3000.0, "GB/s", share=0.754))
    _, right, wrong, fast = table(lines).splitlines()
    assert "WRONG" not in right
    assert wrong.endswith("WRONG")
    assert fast.endswith("75 %")
