"""What a side's process says and hears: one JSON object a line, a command in, an answer out."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypedDict

PR_SET_PDEATHSIG = 1
FORGET_PEAK = "5"
"""Written to `/proc/PID/clear_refs`, it sets the peak of the resident memory to the present."""

Prompt = Sequence[int]


class Arrival(TypedDict):
    """A request of an online run."""

    at_s: float
    """After the beginning."""
    prompt: list[int]
    max_tokens: int
    awaited: bool
    """The run ends when all such requests have; the others are dropped then."""


class Played(TypedDict):
    """What became of an arrival."""

    arrived_s: float
    token_s: list[float]
    """The moment of each token."""


class Driver(Protocol):
    """A side: an engine with one model."""

    def load(self) -> dict[str, Any]:
        """Make the engine ready; its versions and settings."""
        ...

    def reset(self) -> None:
        """Forget every prefix. Never timed."""
        ...

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
        """Exactly `max_tokens` greedy tokens for each prompt, all submitted at once."""
        ...

    def play(self, arrivals: list[Arrival]) -> list[Played]:
        """Let requests arrive at their times (in order), and note when each token came."""
        ...

    def processes(self) -> list[int]:
        """Whose memory counts."""
        ...

    def close(self) -> None: ...


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends, however that ends, frozen or not."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(make: Callable[[dict[str, Any]], Driver]) -> None:
    """Answer commands until the input ends. What the engine prints goes to standard error."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: options["threads"]]))
    driver = make(options)
    try:
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = _obey(driver, command.pop("do"), command)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        driver.close()


def _obey(driver: Driver, do: str, arguments: dict[str, Any]) -> Any:
    match do:
        case "run":
            driver.reset()
            _forget_peak(driver.processes())
            began_s = time.perf_counter()
            outputs = driver.generate(**arguments)
            seconds = time.perf_counter() - began_s
            return {"seconds": seconds, "outputs": outputs, "peak_bytes": _memory(driver.processes(), "VmHWM")}
        case "play":
            driver.reset()
            return driver.play(**arguments)
        case _:
            return getattr(driver, do)(**arguments)


def _forget_peak(processes: list[int]) -> None:
    for pid in processes:
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text(FORGET_PEAK)


def _memory(processes: list[int], field: str) -> int:
    """Bytes of resident memory (`VmRSS`), or its peak (`VmHWM`), of all the processes."""
    total = 0
    for pid in processes:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(field):
                    total += int(line.split()[1]) * 1024
    return total
