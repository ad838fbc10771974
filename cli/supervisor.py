"""Child processes that are started in order, watched, restarted, and stopped in order.

A child that ends while it is wanted is started again after a pause that doubles from one second to
half a minute; one that ends `MAX_CRASHES` times without having stayed up for `STABLE_S` in between
makes the supervisor give up, and everything stops.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from cli.output import Failure

STABLE_S = 60.0
MAX_CRASHES = 5
MAX_BACKOFF_S = 30.0
POLL_S = 0.1


@dataclass(frozen=True)
class Service:
    """What to run, and how to tell that it works."""

    name: str
    argv: tuple[str, ...]
    ready: Callable[[], bool]
    """Whether it serves now. Cheap, raises nothing."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""
    ready_timeout_s: float = 60.0
    stop_timeout_s: float = 10.0
    """From SIGTERM to SIGKILL."""


class State(StrEnum):
    """Where a child stands."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a child's output."""

    service: str
    text: str


class Child:
    """One service's process, its log, and its restarts."""

    def __init__(self, service: Service, log: Path, show: Callable[[Line], None]) -> None:
        self.service = service
        self.log = log
        self.state = State.STOPPED
        self.crashes = 0
        self.started_s = 0.0
        self.retry_s = 0.0
        self.tail: deque[str] = deque(maxlen=15)
        self._show = show
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        tether = [sys.executable, "-S", "-E", str(Path(__file__).with_name("tether.py")), str(os.getpid())]
        self._process = subprocess.Popen(  # noqa: S603
            [*tether, *self.service.argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.service.env},
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        self.started_s = time.monotonic()
        self.state = State.STARTING

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as output, self.log.open("a", encoding="utf-8") as log:
            for raw in output:
                text = raw.decode("utf-8", "replace").rstrip()
                log.write(text + "\n")
                log.flush()
                self.tail.append(text)
                self._show(Line(self.service.name, text))

    def exit_status(self) -> int | None:
        """The status that the process ended with, or None while it runs; negative for a signal."""
        return self._process.poll() if self._process is not None else None

    def signal(self, number: int) -> None:
        """Send a signal to the child's whole process group."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return

    def stop(self, wait: Callable[[float], bool]) -> None:
        """SIGTERM, then SIGKILL when its time is up or `wait(seconds)` says that nobody wants to wait."""
        if self._process is None:
            return
        self.state = State.STOPPING
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + self.service.stop_timeout_s
        while self._process.poll() is None and time.monotonic() < deadline and wait(POLL_S):
            pass
        self.signal(signal.SIGKILL)
        self._process.wait()
        if self._reader is not None:
            self._reader.join(2.0)
        self.state = State.STOPPED


class Supervisor:
    """Starts services in order, keeps them running, stops them in an order of the caller's."""

    def __init__(
        self, logs: Path, show: Callable[[Line], None], report: Callable[[str], None], interrupted: threading.Event
    ) -> None:
        self._logs = logs
        self._show = show
        self._report = report
        self._interrupted = interrupted
        self._impatient = threading.Event()
        self.children: dict[str, Child] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, service: Service) -> Child:
        """Start a service, without waiting for it."""
        log = self._logs / f"{service.name}.log"
        if log.exists():
            log.replace(log.with_suffix(".log.1"))
        child = self.children[service.name] = Child(service, log, self._show)
        child.start()
        return child

    def wait_ready(self, children: Sequence[Child]) -> None:
        """Return when all are ready. Raises Failure if one ends or is late, KeyboardInterrupt if told to stop."""
        while pending := [child for child in children if child.state is not State.READY]:
            for child in pending:
                status = child.exit_status()
                if status is not None:
                    raise _not_started(child, f"{child.service.name} ended during start-up ({describe(status)})")
                if child.service.ready():
                    child.state = State.READY
                elif time.monotonic() - child.started_s > child.service.ready_timeout_s:
                    raise _not_started(
                        child, f"{child.service.name} is not ready after {child.service.ready_timeout_s:.0f} s"
                    )
            if self._interrupted.wait(POLL_S):
                raise KeyboardInterrupt

    def watch(self, changed: Callable[[], None]) -> None:
        """Keep all children running until interrupted; `changed` is called after each restart."""
        while not self._interrupted.wait(POLL_S):
            for child in self.children.values():
                if self._tend(child):
                    changed()

    def _tend(self, child: Child) -> bool:
        """Look after one child; whether it has just been started again."""
        now = time.monotonic()
        if child.state is State.WAITING:
            if now < child.retry_s:
                return False
            child.start()
            return True
        status = child.exit_status()
        if status is None:
            if child.state is State.STARTING and child.service.ready():
                child.state = State.READY
                self._report(f"{child.service.name} is ready again")
            return False
        child.crashes = 1 if now - child.started_s > STABLE_S else child.crashes + 1
        if child.crashes >= MAX_CRASHES:
            raise _not_started(child, f"{child.service.name} ended {child.crashes} times in a row ({describe(status)})")
        pause_s = min(2.0 ** (child.crashes - 1), MAX_BACKOFF_S)
        child.retry_s = now + pause_s
        child.state = State.WAITING
        self._report(f"{child.service.name} ended ({describe(status)}); starting it again in {pause_s:.0f} s")
        return False

    def hurry(self) -> None:
        """Give up waiting for children to end by themselves. Callable from a signal handler."""
        self._impatient.set()

    def stop(self, order: Sequence[str]) -> None:
        """Stop children in this order, then those that it doesn't name."""
        for name in [*order, *(name for name in self.children if name not in order)]:
            child = self.children.get(name)
            if child is not None and child.pid is not None:
                self._report(f"stopping {name}")
                child.stop(lambda seconds: not self._impatient.wait(seconds))

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self.children.items() if child.pid is not None}


def _not_started(child: Child, message: str) -> Failure:
    tail = "\n".join(f"  {line}" for line in child.tail)
    return Failure(f"{message}; its last lines:\n{tail}" if tail else message, f"the whole log: {child.log}")


def describe(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
