"""Named points of a job's life at which a real process can be struck.

Loaded into a worker with `-I tests.faults.points`; `python -m tests.faults.points` is an API that has it. Whoever
holds the directory `FAULT_POINTS` arms a point by a file; the first process that comes by takes the file and does to
itself what it says. A point that isn't armed costs one look at the directory.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

VARIABLE = "FAULT_POINTS"
HELD_S = 60.0
"""Nobody is held for longer: a test that forgot to let go fails by its own limit."""


class Strike(StrEnum):
    """What a process does to itself at a point."""

    KILL = "KILL"
    TERM = "TERM"
    QUIT = "QUIT"
    STOP = "STOP"
    """Until somebody sends SIGCONT."""
    HOLD = "HOLD"
    """The thread that came by waits until it is let go; the rest of the process goes on."""


@dataclass(frozen=True, slots=True)
class Point:
    """A moment just before or just after a call of one method."""

    name: str
    method: str
    """`module:Class.method`."""
    after: bool = False
    when: Callable[..., bool] = lambda *_: True
    """Whether a call with these arguments is the moment that is meant."""


def _first_token(_self: Any, deltas: Sequence[Any]) -> bool:
    return any(delta.offset == 0 and delta.token_ids for delta in deltas)


def _a_result(_self: Any, batch: Sequence[Any]) -> bool:
    return any(hasattr(item, "compose") for item in batch)


SUBMISSION = (
    Point("before submit", "ledger.ledger:Ledger.submit"),
    Point("after submit", "ledger.ledger:Ledger.submit", after=True),
    Point("before publish", "ledger.transport:CeleryTransport.publish"),
    Point("after publish", "ledger.transport:CeleryTransport.publish", after=True),
)
WORK = (
    Point("before claim", "worker.writer:Writer._claim"),
    Point("after claim", "worker.writer:Writer._claim", after=True),
    Point("before admission", "worker.slot:Slot.generate"),
    Point("first token", "worker.listener:Listener.on_tokens", when=_first_token),
    Point("last token", "worker.listener:Listener.on_finished"),
    Point("before commit", "worker.writer:Writer._commit"),
    Point("after commit", "worker.writer:Writer._commit", after=True),
    Point("before result", "worker.telemetry:Telemetry._deliver", when=_a_result),
    Point("after result", "worker.telemetry:Telemetry._deliver", after=True, when=_a_result),
    Point("before acknowledgement", "worker.message:JobMessage.acknowledge"),
    Point("after acknowledgement", "worker.message:JobMessage.acknowledge", after=True),
)
"""The points of a job in its worker, in the order in which it comes by them."""


@dataclass(frozen=True, slots=True)
class Points:
    """The directory, as the one sees it who arms."""

    directory: Path

    def arm(self, point: str, strike: Strike) -> None:
        """The next process that comes by is struck, and no other."""
        waiting = self.directory / f".{point}"
        waiting.write_text(strike)
        waiting.rename(self.directory / f"{point}.armed")

    def struck(self, point: str) -> int | None:
        """Who was struck there: a process id, or None while nobody was."""
        found = list(self.directory.glob(f"{point}.struck.*"))
        return int(found[0].name.rpartition(".")[2]) if found else None

    def clear(self) -> None:
        """Disarm everything, and let go whoever is held."""
        for path in self.directory.iterdir():
            path.unlink(missing_ok=True)


def reach(directory: Path, point: str) -> None:
    """Come by a point."""
    armed, struck = directory / f"{point}.armed", directory / f"{point}.struck.{os.getpid()}"
    try:
        strike = Strike(armed.read_text())
        armed.rename(struck)
    except FileNotFoundError:
        return
    if strike is not Strike.HOLD:
        os.kill(os.getpid(), getattr(signal, f"SIG{strike}"))
        return
    until_s = time.monotonic() + HELD_S
    while struck.exists() and time.monotonic() < until_s:
        time.sleep(0.01)


def install(directory: Path, points: Sequence[Point]) -> None:
    """Have this process come by the points."""
    for point in points:
        module_name, _, path = point.method.partition(":")
        class_name, _, method_name = path.partition(".")
        owner = getattr(importlib.import_module(module_name), class_name)
        setattr(owner, method_name, _watched(getattr(owner, method_name), directory, point))


def _watched(method: Callable[..., Any], directory: Path, point: Point) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        meant = point.when(*args)
        if meant and not point.after:
            reach(directory, point.name)
        result = method(*args, **kwargs)
        if meant and point.after:
            reach(directory, point.name)
        return result

    return watched


if VARIABLE in os.environ:
    in_worker = "worker.app" in sys.modules
    install(Path(os.environ[VARIABLE]), (*SUBMISSION, *WORK) if in_worker else SUBMISSION)

if __name__ == "__main__":
    from api.main import run_api
    from settings import Settings

    run_api(Settings())
