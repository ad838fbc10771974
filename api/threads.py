"""Runs the ledger's synchronous methods on threads, and keeps those threads free while the database is away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread

from ledger.contract import LedgerUnavailable

LEDGER_THREADS = 16
TRY_EVERY_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")


class LedgerThreads:
    """After a call has found the database away, one call a second tries it again; the others fail at once.

    The ledger itself retries for seconds before it says so, and every call of those would hold a thread.
    """

    def __init__(self, threads: int = LEDGER_THREADS) -> None:
        self._limiter = CapacityLimiter(threads)
        self._away = False
        self._trying = False
        self._next_try_s = 0.0
        self.cpu_s = 0.0
        """Processor time of all calls."""
        self._counting = threading.Lock()

    async def call(self, method: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The method's result. Raises LedgerUnavailable."""
        if self._away and (self._trying or time.monotonic() < self._next_try_s):
            raise LedgerUnavailable("the database is away")
        trial = self._away
        self._trying = self._trying or trial
        try:
            result = await to_thread.run_sync(
                partial(self._run, trial, partial(method, *args, **kwargs)), limiter=self._limiter
            )
        except LedgerUnavailable:
            self._away = True
            self._next_try_s = time.monotonic() + TRY_EVERY_S
            raise
        else:
            self._away = False
            return result
        finally:
            if trial:
                self._trying = False

    def _run(self, trial: bool, call: Callable[[], T]) -> T:
        """On the thread. The database may have gone while the call waited for it."""
        if self._away and not trial:
            raise LedgerUnavailable("the database is away")
        began_s = time.thread_time()
        try:
            return call()
        finally:
            with self._counting:
                self.cpu_s += time.thread_time() - began_s
