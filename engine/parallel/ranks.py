"""The processes of all ranks but the first, as the first one sees them."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from engine.executor import ModelFailed

LEAVE_S = 5.0
"""How long a rank may take to leave before it is killed."""
NOTICE_S = 1.0
"""How long after the first sign of a loss it may show that a process has ended: that says more than others' errors."""


class RankLost(RuntimeError):
    """Another rank doesn't answer: the ranks can compute nothing together any more."""


class RankFailed(RuntimeError):
    """Another rank raised; all of them go on."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a call on one rank."""

    value: Any = None
    error: str | None = None
    short_of_memory: bool = False
    lost: bool = False
    """Whether the rank has lost the others."""

    def check(self, rank: int) -> Any:
        """Its value; raises what the rank raised, as MemoryError or `RankFailed`."""
        if self.error is None:
            return self.value
        raise (MemoryError if self.short_of_memory else RankFailed)(f"rank {rank}: {self.error}")


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    calls: Connection
    life: int
    """A file to read that ends when the process does."""


class Ranks:
    """Processes that do what they are called to do, all the same and in one order.

    They die with this one, however it ends: a rank's calls end then, and the kernel kills it. One thread starts them
    and watches over them, and lives as long as they do, because what the kernel looks at is the thread.
    """

    def __init__(self, count: int, patience_s: float) -> None:
        """Start ranks 1 to `count` and return when all are there. Raises ModelFailed if one isn't."""
        self._patience_s = patience_s
        self._ranks: list[_Rank] = []
        self._lost: str | None = None
        self._closing = False
        self._listeners: list[Callable[[str], None]] = []
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._ended = threading.Event()
        """One of them."""
        self._failure: OSError | None = None
        self._watcher = threading.Thread(target=self._watch, args=(count,), name="ranks", daemon=True)
        self._watcher.start()
        self._started.wait()
        try:
            if self._failure is not None:
                raise ModelFailed(f"no process can be started: {self._failure}") from self._failure
            self.answers(patient=True)
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def on_loss(self, call: Callable[[str], None]) -> None:
        """Have `call` called, on any thread, with what happened if a rank is lost; at once if one is lost already."""
        with self._lock:
            self._listeners.append(call)
            lost = self._lost
        if lost is not None:
            call(lost)

    def call(self, name: str, *arguments: Any) -> None:
        """Have every rank do something; `answers` has to follow."""
        self.call_each(name, [arguments] * len(self._ranks))

    def call_each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """The same, with each rank's own arguments."""
        self._check()
        for rank, own in zip(self._ranks, arguments, strict=True):
            try:
                rank.calls.send((name, own))
            except OSError as error:
                self.lose(f"rank {rank.number} takes no calls: {error}")

    def answers(self, patient: bool = False) -> list[Answer]:
        """One of each rank. Raises ModelFailed if one doesn't come: within the patience, unless one is `patient`."""
        self._check()
        found = []
        for rank in self._ranks:
            try:
                if not patient and not rank.calls.poll(self._patience_s):
                    self.lose(f"rank {rank.number} has not answered for {self._patience_s:g} s")
                answer: Answer = rank.calls.recv()
                if answer.lost:
                    self.lose(f"rank {rank.number}: {answer.error}")
                found.append(answer)
            except (EOFError, OSError):
                self.lose(f"rank {rank.number} has ended")
            except ModelFailed:
                raise
            except BaseException:  # a part of an answer may have been read
                self._note_loss("an answer was interrupted")
                raise
        return found

    def lose(self, what: str) -> None:
        """Give the ranks up. Raises ModelFailed: with `what` was seen, or with how a rank's process ended."""
        if not self._closing:
            self._ended.wait(NOTICE_S)
        self._note_loss(what)
        self._check()

    def close(self) -> None:
        """End all ranks; those that don't leave by themselves are killed."""
        self._closing = True
        for rank in self._ranks:
            rank.calls.close()
        self._watcher.join(LEAVE_S)
        if self._watcher.is_alive():
            for rank in self._ranks:
                rank.process.kill()
            self._watcher.join()

    def _check(self) -> None:
        if self._lost is not None:
            raise ModelFailed(f"the model's ranks are of no use any more: {self._lost}") from None

    def _note_loss(self, what: str) -> None:
        with self._lock:
            if self._lost is not None or self._closing:
                return
            self._lost = what
            listeners = list(self._listeners)
        for call in listeners:
            call(what)

    def _watch(self, count: int) -> None:
        try:
            for number in range(1, count + 1):
                self._ranks.append(_start(number))
        except OSError as error:
            self._failure = error
        self._started.set()
        living = {rank.life: rank for rank in self._ranks}
        while living:
            for life in select.select(list(living), [], [])[0]:
                rank = living.pop(life)
                os.close(life)
                status = rank.process.wait()
                by = f"by signal {-status}" if status < 0 else f"with status {status}"
                self._note_loss(f"rank {rank.number} (process {rank.process.pid}) ended {by}")
                self._ended.set()


def _start(number: int) -> _Rank:
    ours, theirs = socket.socketpair()
    life, their_life = os.pipe()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "engine.parallel.follower", *map(str, (os.getpid(), theirs.fileno(), number))],
            pass_fds=(theirs.fileno(), their_life),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
    except BaseException:
        ours.close()
        os.close(life)
        raise
    finally:
        theirs.close()
        os.close(their_life)
    return _Rank(number, process, Connection(ours.detach()), life)
