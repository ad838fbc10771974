"""The one thread that talks to the ledger: claims, commits, releases, rejections, cancellations and leases.

What arrives while a transaction is under way goes into the next one: at most 256 rows, at most one
transaction of a kind every 20 ms unless much waits, and no wait at all when it has been quiet. While the database is
away nothing is lost and nothing is acknowledged: outcomes are spooled to disk, claims wait, and the
thread tries again until the database is back.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from celery.utils.log import get_logger
from headrace.contract import Job, JobStatus, ModelCard

from ledger.contract import Claim, ClaimResult, Lease, LedgerProtocol, LedgerUnavailable, Verdict
from worker.draft import Draft
from worker.orders import Backlog, Cancellation, Done, Order, Recorded, Rejection
from worker.spool import Leftover, Spool, leftovers

log = get_logger(__name__)

A = TypeVar("A")
R = TypeVar("R")

BATCH_ROWS = 256
"""In one transaction."""
ENOUGH_ROWS = 32
"""These are worth a transaction at once."""
BATCH_S = 0.02
NAP_S = 0.005
"""How often what has come is looked at, until it is worth a transaction."""
RETRY_MIN_S = 0.1
RETRY_MAX_S = 2.0
LAST_TRY_S = 11.0
"""How long a transaction that is under way when the thread is told to end may take."""


class Writer(threading.Thread):
    """Every method may be called from any thread and returns at once."""

    def __init__(
        self,
        ledger: LedgerProtocol,
        owner: str,
        lease_s: float,
        spool_directory: Path,
        on_lost: Callable[[Lease], None],
        on_cancelled: Callable[[Lease], None],
    ) -> None:
        super().__init__(name="headrace-writer", daemon=True)
        self._ledger = ledger
        self._owner = owner
        self._lease_s = lease_s
        self._spool = Spool(spool_directory)
        self._leftovers: list[Leftover] = leftovers(spool_directory)
        self._on_lost = on_lost
        self._on_cancelled = on_cancelled
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._backlog = Backlog()
        self._model: tuple[ModelCard, bytes] | None = None
        self._held: dict[str, Lease] = {}
        self._spooled: set[str] = set()
        self._spool_fails = False
        self._renew_at_s = 0.0
        self._flushed_s = 0.0
        self._retry_at_s = 0.0
        self._retry_s = 0.0
        """0 while the database answers."""
        self._leaving_at_s: float | None = None
        self.cpu_s = 0.0
        """Processor time of this thread."""
        self._claimed: Callable[[], None] = lambda: None

    # -- orders --------------------------------------------------------------------------------

    def claim(self, claim: Claim, done: Done[ClaimResult]) -> None:
        self._inbox.put(lambda: self._backlog.claims.append(Order(claim, done)))

    def commit(self, draft: Draft, done: Done[Recorded | None]) -> None:
        """Record how a job ended; `done` gets what was written, or None if the lease was lost."""
        self._inbox.put(lambda: self._backlog.commits.append(Order(draft, done)))

    def release(self, lease: Lease, done: Done[bool]) -> None:
        self._inbox.put(lambda: self._backlog.releases.append(Order(lease, done)))

    def reject(self, rejection: Rejection, done: Done[None]) -> None:
        self._inbox.put(lambda: self._backlog.rejections.append(Order(rejection, done)))

    def cancel(self, job_ids: Sequence[str], running: bool) -> None:
        self._inbox.put(lambda: self._backlog.cancellations.append(Cancellation(tuple(job_ids), running)))

    def look(self, job_id: str, done: Done[Job | None]) -> None:
        """Read a job."""
        self._inbox.put(lambda: self._backlog.lookups.append(Order(job_id, done)))

    def forget(self, job_id: str) -> None:
        """Renew this job's lease no longer."""
        self._inbox.put(lambda: self._drop(job_id))

    def register(self, card: ModelCard, text_bundle: bytes) -> None:
        """Tell the doors what this worker's model is."""
        self._inbox.put(lambda: self._set_model(card, text_bundle))

    def when_claimed(self, call: Callable[[], None]) -> None:
        """Call this whenever jobs were claimed that the ledger had queued: others may be sent in their place."""
        self._claimed = call

    def available(self) -> bool:
        """Whether the database answered the last time."""
        return self._retry_s == 0.0

    def stop(self, patience_s: float) -> None:
        """Write what is left, for at most `patience_s`, and end the thread. What stays is in the spool."""
        self._inbox.put(lambda: self._leave(time.monotonic() + patience_s))
        self.join(patience_s + LAST_TRY_S)
        self._spool.close()

    def _drop(self, job_id: str) -> None:
        self._held.pop(job_id, None)

    def _set_model(self, card: ModelCard, text_bundle: bytes) -> None:
        self._model = (card, text_bundle)

    def _leave(self, at_s: float) -> None:
        self._leaving_at_s = at_s

    # -- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        while True:
            try:
                self._gather()
                if self._leaving_at_s is not None and (not self._unwritten() or time.monotonic() >= self._leaving_at_s):
                    self._save()
                    return
                self._turn()
            except Exception:
                log.exception("the writer's turn failed")
                time.sleep(RETRY_MIN_S)
            finally:
                self.cpu_s = time.thread_time()

    def _unwritten(self) -> bool:
        return bool(len(self._backlog) or self._model or self._leftovers)

    def _gather(self) -> None:
        """Wait for orders, but not past the next renewal or retry, and take all that are there."""
        now = time.monotonic()
        wake_s = self._renew_at_s if self._held else now + self._lease_s
        if self._unwritten():
            wake_s = min(wake_s, max(self._retry_at_s, self._flushed_s + BATCH_S))
        if self._leaving_at_s is not None:
            wake_s = min(wake_s, self._leaving_at_s if self._unwritten() else now)
        self._take(max(0.0, wake_s - now))
        quiet_at_s = self._flushed_s + BATCH_S
        while len(self._backlog) < ENOUGH_ROWS and (left_s := quiet_at_s - time.monotonic()) > 0:
            # Orders come one by one: whoever waits for each takes the interpreter from the thread that brings the next.
            time.sleep(min(left_s, NAP_S))
            self._take(0.0)

    def _take(self, timeout_s: float) -> bool:
        try:
            order = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return False
        while True:
            order()
            try:
                order = self._inbox.get_nowait()
            except queue.Empty:
                return True

    def _turn(self) -> None:
        now = time.monotonic()
        if now < self._retry_at_s:
            self._save()
            return
        try:
            self._renew(now)
            self._write_all()
        except LedgerUnavailable as exc:
            self._save()
            self._back_off(exc)
            return
        if self._retry_s:
            log.warning("the ledger is back")
            self._retry_s = self._retry_at_s = 0.0
        if not self._backlog.commits:
            self._spool.clear()
            self._spooled.clear()

    def _back_off(self, exc: LedgerUnavailable) -> None:
        if not self._retry_s:
            log.error("the ledger is unavailable, running jobs go on and no new ones start: %s", exc)
        self._retry_s = min(RETRY_MAX_S, max(RETRY_MIN_S, self._retry_s * 2))
        self._retry_at_s = time.monotonic() + self._retry_s

    def _save(self) -> None:
        """Spool the outcomes that are waiting and not yet on disk."""
        now = time.monotonic()
        drafts = [order.what for order in self._backlog.commits if order.what.lease.job_id not in self._spooled]
        if drafts:
            try:
                self._spool.append([draft.outcome(now) for draft in drafts])
            except OSError as exc:
                if not self._spool_fails:
                    log.error("outcomes can't be spooled, they are in memory only: %s", exc)
                self._spool_fails = True
                return
            self._spool_fails = False
            self._spooled.update(draft.lease.job_id for draft in drafts)

    # -- writing -------------------------------------------------------------------------------

    def _renew(self, now: float) -> None:
        if not self._held or now < self._renew_at_s:
            return
        held = dict(self._held)
        renewal = self._ledger.renew(list(held.values()), self._lease_s)
        self._renew_at_s = now + self._lease_s / 3
        for job_id in renewal.lost:
            self._drop(job_id)
            self._on_lost(held[job_id])
        for job_id in renewal.cancelled:
            self._on_cancelled(held[job_id])

    def _write_all(self) -> None:
        """Endings before claims, so that a delivery that comes again finds its job ended."""
        if self._model is not None:
            self._ledger.register_model(*self._model)
            self._model = None
        while self._leftovers:
            self._replay(self._leftovers[0])
            self._leftovers.pop(0).remove()
        backlog = self._backlog
        if len(backlog):
            self._flushed_s = time.monotonic()
        self._flush(backlog.commits, self._commit)
        self._flush(backlog.releases, self._release)
        self._flush(backlog.rejections, self._reject)
        while backlog.cancellations:
            self._cancel(backlog.cancellations[0])
            backlog.cancellations.pop(0)
        self._flush(backlog.claims, self._claim)
        self._flush(backlog.lookups, self._look)

    def _flush(self, orders: list[Order[A, R]], write: Callable[[list[A]], list[R]]) -> None:
        """Write orders in batches; once a batch fails, one at a time, so that only the bad one is told so."""
        rows = BATCH_ROWS
        while orders:
            batch = orders[:rows]
            answers: list[R | Exception] = []
            try:
                answers.extend(write([order.what for order in batch]))
            except LedgerUnavailable:
                raise
            except Exception as exc:
                if rows > 1:
                    rows = 1
                    continue
                what: object = batch[0].what
                log.exception("the ledger refused a %s", type(what).__name__)
                answers.append(exc)
                if isinstance(what, Draft):
                    # If nothing else ends the job, its lease does.
                    self._drop(what.lease.job_id)
            del orders[: len(batch)]
            for order, answer in zip(batch, answers, strict=True):
                order.done(answer)

    def _claim(self, claims: list[Claim]) -> list[ClaimResult]:
        results = self._ledger.claim(claims, self._owner, self._lease_s)
        if not self._held:
            self._renew_at_s = time.monotonic() + self._lease_s / 3
        for result in results:
            if result.verdict is Verdict.RUN and result.lease is not None:
                self._held[result.job_id] = result.lease
        if any(claim.request is None for claim in claims):
            self._claimed()
        return results

    def _commit(self, drafts: list[Draft]) -> list[Recorded | None]:
        now = time.monotonic()
        outcomes = [draft.outcome(now) for draft in drafts]
        jobs = self._ledger.record(outcomes)
        for draft in drafts:
            self._drop(draft.lease.job_id)
        return [Recorded(o, job) if job is not None else None for o, job in zip(outcomes, jobs, strict=True)]

    def _release(self, leases: list[Lease]) -> list[bool]:
        released = self._ledger.release(leases)
        for lease in leases:
            self._drop(lease.job_id)
        return released

    def _look(self, job_ids: list[str]) -> list[Job | None]:
        found = self._ledger.jobs(job_ids)
        return [found.get(job_id) for job_id in job_ids]

    def _reject(self, rejections: list[Rejection]) -> list[None]:
        for one in rejections:
            self._ledger.reject(one.job_id, one.model, one.reason, one.message, one.raw, one.traceparent)
        return [None] * len(rejections)

    def _cancel(self, cancellation: Cancellation) -> None:
        """Make a revoke durable. A job that runs elsewhere is marked once: the mark is what its worker sees."""
        wanted = []
        for job_id in cancellation.job_ids:
            job = self._ledger.get(job_id)
            if job is None:
                self._ledger.revoke([job_id])
                job = self._ledger.get(job_id)
            if job is None or job.status.terminal:
                continue
            if job.status is JobStatus.QUEUED or (cancellation.running and not job.cancel_requested):
                wanted.append(job_id)
        if wanted:
            self._ledger.request_cancel(wanted)

    def _replay(self, leftover: Leftover) -> None:
        """One at a time, so that what is no outcome keeps no other from its end."""
        wanted = 0
        for outcome in leftover.outcomes:
            try:
                wanted += sum(self._ledger.commit([outcome]))
            except LedgerUnavailable:
                raise
            except Exception:
                log.exception("job %s: its spooled outcome can't be recorded", outcome.lease.job_id)
        log.warning("replayed %d spooled outcomes, %d were still wanted", len(leftover.outcomes), wanted)
