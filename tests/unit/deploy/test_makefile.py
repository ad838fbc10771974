"""The Makefile's targets run what the code has, and say what is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.lanes import LANES

ROOT = Path(__file__).parents[3]
MAKEFILE = (ROOT / "Makefile").read_text()


def make(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "-C", str(ROOT), *arguments], env={**os.environ, **env}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "target", ["demo", "test", "quick", "check", "audit", "bench", "bench-peers", "long-run", "lint-fix", "install"]
)
def test_the_target_is_there_and_explained(target: str, tmp_path: Path) -> None:
    done = make("--dry-run", target, f"VENV={tmp_path}/venv")
    assert done.returncode == 0, done.stderr
    assert f"make {target}" in make("help").stdout


def test_an_old_python_is_refused_with_its_version(tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = make("demo", f"PYTHON={old}", f"VENV={tmp_path}/venv")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "Python 3.9.2" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_missing_redis_is_told_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "bin"
    path.mkdir()
    for tool in ("make", "sh", "bash", "awk"):
        found = shutil.which(tool)
        assert found is not None
        (path / tool).symlink_to(found)
    done = make("redis-server", PATH=str(path))
    assert done.returncode != 0
    assert "apt-get install redis-server" in done.stderr


def test_the_suites_that_it_names_exist() -> None:
    assert "python -m tests.lanes" in MAKEFILE
    named = [word for lane in LANES.values() for command in lane for word in command if word.startswith("tests")]
    assert len(named) > 4
    for folder in named:
        assert (ROOT / folder).is_dir(), folder


def test_what_it_runs_with_python_exists() -> None:
    modules = re.findall(r"python -m (bench\.\w+)", MAKEFILE)
    assert modules == ["bench.peers", "bench.endurance"]
    for module in modules:
        assert (ROOT / module.replace(".", "/") / "__main__.py").exists()
    for script in re.findall(r"python (bench/\w+\.py)", MAKEFILE):
        assert (ROOT / script).exists()


def test_ci_runs_the_tests() -> None:
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()


def test_a_library_that_is_not_there_is_built_as_soon_as_there_is_a_compiler(tmp_path: Path) -> None:
    for stamp in (".served", ".tested"):
        (tmp_path / stamp).touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    library = tmp_path / "headrace_cpu.so"
    given = ("--dry-run", "demo", "install", f"VENV={tmp_path}", f"LIBRARY={library}", "INPUTS=")
    built = make(*given, "CXX=sh").stdout
    assert "Building the CPU library" in built
    assert "pip install" in built
    assert "pip install" not in make(*given, "CXX=no-such-compiler").stdout
    library.touch()
    assert "pip install" not in make(*given, "CXX=sh").stdout
