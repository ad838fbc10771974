"""A running `headrace up` for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

FAKE = {"HEADRACE_MODEL__MODEL_PATH": "fake:step_s=0.01", "HEADRACE_MODEL__ALIAS": "fake"}
ROOT = Path(__file__).parents[2]


def headrace(*arguments: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=options.pop("timeout", 60),
        check=False,
        **options,
    )


@dataclass
class Up:
    """One `headrace up` and its home."""

    home: Path
    process: subprocess.Popen[str]
    output: Path

    @classmethod
    def start(cls, home: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Up:
        """Start it with the fake model on free ports, without waiting."""
        home.mkdir(parents=True, exist_ok=True)
        output = home / "output"
        free = ("--api-port", "0", "--flower-port", "0", "--broker-port", "0", "--home", str(home))
        with output.open("w") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "cli", "up", *free, *arguments],
                env={**os.environ, **FAKE, "HEADRACE_WORKER__METRICS_PORT": "0", **(env or {})},
                stdout=sink,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return cls(home, process, output)

    def wait_ready(self, timeout_s: float = 90) -> dict[str, Any]:
        """Its state file, once it serves."""
        deadline = time.monotonic() + timeout_s
        while not self._serves():
            assert self.process.poll() is None, f"it ended:\n{self.text()}"
            assert time.monotonic() < deadline, f"it is not ready:\n{self.text()}"
            time.sleep(0.1)
        return self.state()

    def _serves(self) -> bool:
        """Whether there is a state file, and it isn't one that a killed instance left."""
        return (self.home / "up.json").exists() and self.state()["pid"] == self.process.pid

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.home / "up.json").read_text())
        return state

    def text(self) -> str:
        return self.output.read_text()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, number: int = signal.SIGINT, timeout_s: float = 60) -> int:
        """Send a signal and wait for the end; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"it did not stop:\n{self.text()}") from None


def gone(processes: Sequence[psutil.Process], within_s: float = 10) -> bool:
    """Whether all of these end in time."""
    deadline = time.monotonic() + within_s
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
