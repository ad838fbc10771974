"""The Triton kernels against the reference, interpreted: in processes that have the interpreter from their start."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUITES = {
    "their own tests": [str(HERE / "interpreted")],
    "the tests of every implementation": [
        str(HERE.parent / name) for name in ("test_operations.py", "test_attention.py", "test_thinning.py")
    ],
    "the tests of sampling": [str(HERE.parent / "sampling")],
}
TOO_MANY = "not mixed_batch and not mixture"
"""Interpreted, each of a hundred launches takes seconds: `interpreted/test_shapes.py` covers its shapes with less, and
`interpreted/test_sampling.py` mixtures of parameters."""


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton for this machine")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is such a process")
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("paths", SUITES.values(), ids=SUITES.keys())
def test_interpreted(paths: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}"]
    done = subprocess.run(
        [*command, "-k", TOO_MANY, *paths],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
