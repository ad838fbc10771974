"""The relay: carries the outbox to the broker, and tends to jobs that nobody holds.

Every process that writes to the ledger may run one. Each drains the outbox (a row goes to one relay at a time);
one of them, elected, reaps, reconciles, prunes, and raises what has waited for too long.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ledger.contract import DEFAULT_WINDOWS, Dispatch, LedgerProtocol, LedgerUnavailable, Retention, Topic, Windows
from ledger.reconciler import BrokerView, Reconciler
from ledger.transport import BrokerAway

log = logging.getLogger(__name__)

ROLE = "reaper"
TEND_S = 1.0
"""Between two rounds of reaping and reconciling."""
PRUNE_S = 60.0
"""Between two looks for what is to be forgotten."""
KEPT_FOR_GOOD = Retention()
TERM_S = 5.0
"""A relay that has died is replaced as the elected one after this long."""
OVERDUE_S = 0.5
"""What nobody has reaped for this long after its lease ran out, any relay reaps."""
GRACE_S = 5.0
"""After the database was away, workers have this long to renew leases that ran out meanwhile, before they count."""
LATE_S = 1.0
"""A database that takes longer for an answer was away meanwhile."""
MAX_PAUSE_S = 2.0
"""Longest pause between two attempts at a broker or a database that is away."""
_BATCH = 500


class Publisher(Protocol):
    """Where messages go. Each method raises BrokerAway if it could not do its work."""

    def ping(self) -> None: ...

    def publish(self, dispatches: Sequence[Dispatch]) -> None: ...

    def revoke(self, dispatches: Sequence[Dispatch]) -> None: ...


class Duty:
    """Work to be done again and again, and less often while the parts it needs are away.

    A change of state is logged once, not each attempt.
    """

    def __init__(self, name: str, work: Callable[[], object], every_s: float) -> None:
        self.name = name
        self.work = work
        self.every_s = every_s
        self.due_s = 0.0
        """Moment of the next attempt, on the monotonic clock."""
        self.failures = 0
        """How many attempts have failed since the last good one."""
        self.cpu_s = 0.0
        """Processor time of the thread that attempts it."""

    def attempt(self) -> None:
        try:
            self.work()
        except Exception as error:
            expected = isinstance(error, BrokerAway | LedgerUnavailable)
            if not self.failures:
                log.warning("%s fails, and is tried again: %s", self.name, error, exc_info=not expected)
            self.failures += 1
            self.due_s = time.monotonic() + min(MAX_PAUSE_S, self.every_s * 2.0 ** min(self.failures, 10))
        else:
            if self.failures:
                log.warning("%s works again, after %d failures", self.name, self.failures)
            self.failures = 0
            self.due_s = time.monotonic() + self.every_s
        finally:
            self.cpu_s = time.thread_time()


class Relay:
    """Two threads. One sends what the outbox holds, every `interval_s` and whenever `wake()` is called; the other tends
    to the rest, so that no cancellation waits until a million jobs have been looked through.

    `aging_s` is how long the broker may hold a job unclaimed before the job is raised to the first class. `broker` is
    needed to find lost messages; without it nothing is reconciled. The second thread asks it, so it has a connection of
    its own.
    """

    def __init__(
        self,
        ledger: LedgerProtocol,
        publisher: Publisher,
        owner: str,
        interval_s: float = 0.5,
        broker: BrokerView | None = None,
        windows: Windows = DEFAULT_WINDOWS,
        aging_s: float = 60.0,
        retention: Retention = KEPT_FOR_GOOD,
    ) -> None:
        self._ledger = ledger
        self._publisher = publisher
        self._owner = owner
        self._windows = windows
        self._aging_s = aging_s
        self._retention = retention
        self._prune_at_s = 0.0
        self._reconciler = Reconciler(ledger, broker) if broker is not None else None
        self._sending = Duty("sending", self._send, interval_s)
        self._tending = Duty("reaping and reconciling", self.tend, TEND_S)
        self._reap_from_s: float | None = 0.0
        """None while the database is away."""
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep_sending, name="relay", daemon=True),
            threading.Thread(target=self._keep_tending, name="relay-tending", daemon=True),
        ]

    @property
    def cpu_s(self) -> float:
        """Processor time of both threads."""
        return self._sending.cpu_s + self._tending.cpu_s

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Send now what has just been written. Never blocks."""
        self._woken.set()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the threads. What is unsent stays in the outbox, for the other relays or the next start."""
        self._stopping.set()
        self._woken.set()
        give_up_s = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, give_up_s - time.monotonic()))

    def drain(self) -> int:
        """Send everything whose turn it is, and first of all what is to be stopped. Returns how many rows that was."""
        count = 0
        while revocations := self._ledger.revocations(_BATCH):
            self._publisher.revoke(revocations)
            self._ledger.sent([row.id for row in revocations])
            count += len(revocations)
        while rows := self._ledger.outbox(_BATCH, self._windows):
            if publications := [row for row in rows if row.topic is Topic.PUBLISH]:
                self._publisher.publish(publications)
            if late := [row for row in rows if row.topic is Topic.REVOKE]:
                self._publisher.revoke(late)
            self._ledger.sent([row.id for row in rows])
            count += len(rows)
        return count

    def tend(self) -> None:
        """If this relay is the elected one: reap, raise what is aged, look for lost messages, and prune.

        If it is not, it reaps what is overdue: the elected one may just have died.
        """
        asked_s = time.monotonic()
        try:
            elected = self._ledger.elect(ROLE, self._owner, TERM_S)
        except LedgerUnavailable:
            self._reap_from_s = None
            raise
        answered_s = time.monotonic()
        if self._reap_from_s is None or answered_s - asked_s > LATE_S:
            self._reap_from_s = answered_s + GRACE_S
        if self._reap_from_s <= time.monotonic() and (elected or self._ledger.stale_leases(OVERDUE_S)):
            self._reap()
        if not elected:
            return
        if self._ledger.raise_aged(self._aging_s, self._windows):
            self.wake()
        if self._reconciler is not None and self._reconciler.round():
            self.wake()
        self._prune()

    def _reap(self) -> None:
        while reaped := self._ledger.reap(_BATCH):
            self.wake()
            if reaped < _BATCH:
                return

    def _prune(self) -> None:
        """A batch each second while there is more to remove than one takes, else one each minute."""
        if time.monotonic() < self._prune_at_s:
            return
        pruned = self._ledger.prune(self._retention, _BATCH)
        if max(pruned.jobs, pruned.dead_letters, pruned.revocations) < _BATCH:
            self._prune_at_s = time.monotonic() + PRUNE_S

    def _send(self) -> None:
        if self._sending.failures:
            self._publisher.ping()
        self.drain()

    def _keep_sending(self) -> None:
        duty = self._sending
        while not self._stopping.is_set():
            if duty.due_s <= time.monotonic():
                duty.attempt()
            woken = self._woken.wait(max(0.0, duty.due_s - time.monotonic()))
            self._woken.clear()
            if woken and not duty.failures:
                duty.due_s = 0.0

    def _keep_tending(self) -> None:
        duty = self._tending
        while not self._stopping.wait(max(0.0, duty.due_s - time.monotonic())):
            duty.attempt()
        with contextlib.suppress(LedgerUnavailable):
            self._ledger.elect(ROLE, self._owner, ttl_s=0.0)
