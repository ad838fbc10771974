"""Ctrl-C, SIGTERM and the end of the terminal as an event that a program can wait for."""

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

    def on_signal(self, number: int, frame: object) -> None:
        if self.event.is_set():
            self.hurry()
        self.event.set()


@contextmanager
def interrupts() -> Iterator[Interrupt]:
    """Catch the signals that ask for an end, unless they are ignored (`nohup`), while the context lasts."""
    interrupt = Interrupt()
    previous = {
        number: signal.signal(number, interrupt.on_signal)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
