"""Requests that were submitted and aren't in the engine yet: what is slow in taking them has threads of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from engine.request import EngineRequest

Work = Callable[[], None]
"""What is left of taking a request once it is prepared."""


class Arrival(NamedTuple):
    """A request, and the monotonic moment at which it came."""

    request: EngineRequest
    arrived_s: float


class Arrivals:
    """Prepares requests, each kind in order of arrival.

    There are two kinds, with a thread each: compiling a grammar may take seconds, and only those that need one compiled
    wait for that. An id that was taken back may come again while its first request is still being prepared.
    """

    def __init__(
        self,
        prepare: Callable[[EngineRequest, float], Work],
        compiles: Callable[[EngineRequest], bool],
        deliver: Callable[[Work], None],
    ) -> None:
        """`prepare` must not raise; `compiles` tells whether it would compile a grammar; `deliver` returns at once."""
        self._prepare = prepare
        self._compiles = compiles
        self._deliver = deliver
        self._lock = threading.Lock()
        self._came: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._to_compile: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._quick: dict[str, Arrival] = {}
        self._slow: dict[str, Arrival] = {}
        self._threads = [
            threading.Thread(target=self._prepare_quick, name="engine-prepare", daemon=True),
            threading.Thread(target=self._prepare_slow, name="engine-compile", daemon=True),
        ]

    @property
    def soon(self) -> bool:
        """Whether a request will be delivered in a moment: one that waits for no compiler."""
        return bool(self._quick)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, request: EngineRequest, arrived_s: float) -> None:
        """Take a request whose id isn't here."""
        arrival = Arrival(request, arrived_s)
        with self._lock:
            self._quick[request.id] = arrival
        self._came.put(arrival)

    def take_back(self, request_id: str) -> Arrival | None:
        """The request, which will not be delivered; None if it was, or never came."""
        with self._lock:
            return self._quick.pop(request_id, None) or self._slow.pop(request_id, None)

    def take_all_back(self) -> list[Arrival]:
        """All that were not delivered, and will not be."""
        with self._lock:
            left = [*self._quick.values(), *self._slow.values()]
            self._quick.clear()
            self._slow.clear()
        return left

    def stop(self) -> None:
        """End the threads, which finish what they prepare just now; after `start` only."""
        self._came.put(None)
        for thread in self._threads:
            thread.join()

    def _prepare_quick(self) -> None:
        while (arrival := self._came.get()) is not None:
            if self._waits(self._quick, arrival):
                if self._needs_compiler(arrival.request):
                    self._pass_on(arrival)
                else:
                    self._prepare_one(self._quick, arrival)
        self._to_compile.put(None)

    def _prepare_slow(self) -> None:
        while (arrival := self._to_compile.get()) is not None:
            if self._waits(self._slow, arrival):
                self._prepare_one(self._slow, arrival)

    def _needs_compiler(self, request: EngineRequest) -> bool:
        try:
            return self._compiles(request)
        except Exception:  # `prepare` will find what is wrong with it, and tell
            return False

    def _pass_on(self, arrival: Arrival) -> None:
        with self._lock:
            if self._waits(self._quick, arrival):
                self._slow[arrival.request.id] = self._quick.pop(arrival.request.id)
                self._to_compile.put(arrival)

    def _prepare_one(self, kind: dict[str, Arrival], arrival: Arrival) -> None:
        work = self._prepare(*arrival)
        with self._lock:
            if self._waits(kind, arrival):
                del kind[arrival.request.id]
                self._deliver(work)

    @staticmethod
    def _waits(kind: dict[str, Arrival], arrival: Arrival) -> bool:
        """Whether it was not taken back, and is not another one with the same id."""
        return kind.get(arrival.request.id) is arrival
