"""Ctrl-C and SIGTERM as an event that a program can wait for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupt:
    """Set by the first signal; the second and later ones call `hurry`."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.hurry: Callable[[], None] = lambda: None

    def _on_signal(self, number: int, frame: object) -> None:
        if self.event.is_set():
            self.hurry()
        self.event.set()


@contextmanager
def interrupts() -> Iterator[Interrupt]:
    """Catch SIGINT and SIGTERM for as long as the context lasts. Main thread only."""
    interrupt = Interrupt()
    previous = {number: signal.signal(number, interrupt._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
