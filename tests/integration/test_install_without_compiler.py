"""Without a compiler the installation succeeds, and torch serves what the library would have."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.endurance.random_model import write_random_model

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")
PACKAGES = ("api", "cli", "engine", "kernels", "ledger", "migrations", "settings", "text", "worker")
CONTRACTS = (
    "kernels/test_attention.py",
    "kernels/test_operations.py",
    "kernels/sampling",
    "engine/test_models.py",
    "engine/test_no_numbers.py",
)
"""Tests that every implementation of the kernels and of the model passes."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SERVE = """
import logging, sys
logging.basicConfig(level=logging.INFO)
import kernels
from engine import LLM, SamplingParams
from engine.runner import TorchModel

print("kernels from", kernels.__file__)
with LLM(model=sys.argv[1], cache=sys.argv[2], kv_cache_bytes=2**22, max_seq_len=256) as llm:
    assert isinstance(llm._engine._model, TorchModel)
    [output] = llm.generate("hello", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    print("tokens", len(output.token_ids), output.finish_reason)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, python: str) -> Path:
    """The distribution as pip installs it where every compiler fails, and nothing can be fetched."""
    place = tmp_path_factory.mktemp("install")
    source = place / "source"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, source / name)
    done = subprocess.run(
        [python, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation",
         "--disable-pip-version-check", "--target", str(place / "site"), str(source)],
        env={**os.environ, **dict.fromkeys(("CC", "CXX", "LDSHARED", "LDCXXSHARED"), "/bin/false")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list((place / "site").rglob("*.so"))
    return place / "site"


def run(installed: Path, python: str, *arguments: str, cwd: Path) -> str:
    """What a process says that finds the installed packages, and no others of ours."""
    done = subprocess.run(
        [python, *arguments],
        cwd=cwd, env={**os.environ, "PYTHONPATH": f"{installed}:{ROOT / 'client'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_torch_serves_and_says_why(installed: Path, python: str, tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model")
    told = run(installed, python, "-c", SERVE, str(model), str(tmp_path / "cache"), cwd=tmp_path)
    assert f"kernels from {installed}" in told
    assert "torch serves" in told
    assert "tokens 12 length" in told


def test_it_passes_the_same_tests(installed: Path, python: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    tests = [f"tests/unit/{name}" for name in CONTRACTS]
    options = ("-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base"))
    told = run(installed, python, "-m", "pytest", *options, *tests, cwd=tmp_path)
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|skipped|failed)", told.splitlines()[-1])}
    assert counts["passed"] > 100
    assert counts["skipped"] > 0
    assert "the CPU library" in told
