"""Where the peers live, and how their making is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("HEADRACE_BENCH_HOME") or ROOT / ".bench")
"""Environments, sources, converted models, logs. Git ignores it; it can be deleted at any time."""


class PeerFailed(Exception):
    """A peer can't be made here; the message says what is missing."""


def say(message: str) -> None:
    print(f"bench-peers | {message}", flush=True)


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Run a command with its output shown, at low priority: a build must not take the machine away."""
    nice = [found, "-n", "10"] if (found := shutil.which("nice")) else []
    done = subprocess.run([*nice, *map(str, command)], env={**os.environ, **(env or {})}, check=False)
    if done.returncode:
        raise PeerFailed(f"`{' '.join(map(str, command))}` ended with {done.returncode}")


def make_environment(directory: Path) -> Path:
    """The interpreter of a virtual environment, which is made if it isn't there."""
    python = directory / "bin" / "python"
    if not (directory / "pyvenv.cfg").exists() or not python.exists():
        say(f"making {directory}")
        run(sys.executable, "-m", "venv", "--clear", directory)
    return python


def pip(python: Path, *arguments: str | Path) -> None:
    run(python, "-m", "pip", "--disable-pip-version-check", *arguments)


def is_done(directory: Path, what: Sequence[str]) -> bool:
    """Whether a directory was finished with exactly these versions and settings."""
    stamp = directory / "done.txt"
    return stamp.exists() and stamp.read_text().splitlines() == list(what)


def mark_done(directory: Path, what: Sequence[str]) -> None:
    (directory / "done.txt").write_text("\n".join(what) + "\n")
