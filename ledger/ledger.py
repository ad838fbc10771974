"""The ledger: the job database behind one object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial

from headrace.contract import Job, JobPage, JobRequest, JobStatus, ModelCard, Reason, new_job_id
from sqlalchemy import select

from ledger import attempts, catalogue, deliveries, dispatches, door, integrity, lines, losses, migrate, pressure
from ledger.clock import db_now
from ledger.contract import (
    DEFAULT_WINDOWS,
    Backlog,
    Claim,
    ClaimResult,
    Dispatch,
    Drain,
    JobFilter,
    Lease,
    LedgerProtocol,
    Loss,
    Outcome,
    Pruned,
    Renewal,
    Retention,
    Submission,
    Windows,
)
from ledger.database import Database, shown
from ledger.keys import Keys
from ledger.retention import expired as forgettable
from ledger.retention import prune as forget

_PORTION = 1000
"""Databases bound the number of parameters of a statement."""


def _portions(job_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(job_ids), _PORTION):
        yield job_ids[start : start + _PORTION]


class Ledger(LedgerProtocol):
    """`ledger.contract.LedgerProtocol` on SQLite or PostgreSQL. Each method is one transaction; threads may share it.

    The tables must be there: `ledger.migrate.upgrade(url)` makes them.
    """

    def __init__(self, url: str) -> None:
        self._database = Database(url)
        self.keys = Keys(self._database)
        """The API keys of the HTTP door."""

    def __repr__(self) -> str:
        return f"Ledger({shown(self._database.url)!r})"

    # -- the door ------------------------------------------------------------------------------
    def submit(self, request: JobRequest, job_id: str | None = None, tokens: int | None = None) -> Submission:
        name, seeded = job_id or new_job_id(), door.with_seed(request)
        return self._database.write(
            lambda c: door.submit(c, request, seeded, name, own_id=job_id is None, tokens=tokens)
        )

    def submit_many(self, requests: Sequence[JobRequest]) -> list[Submission]:
        """Many jobs take several transactions."""
        submissions: list[Submission] = []
        for start in range(0, len(requests), _PORTION):
            jobs = [(new_job_id(), asked, door.with_seed(asked)) for asked in requests[start : start + _PORTION]]
            submissions += self._database.write(partial(door.submit_many, asked=jobs))
        return submissions

    def get(self, job_id: str, tenant: str | None = None) -> Job | None:
        return self._database.read(lambda c: door.get(c, job_id, tenant))

    def jobs(self, job_ids: Sequence[str]) -> dict[str, Job]:
        return self._database.read(lambda c: door.jobs(c, job_ids)) if job_ids else {}

    def ended(self, job_ids: Sequence[str]) -> frozenset[str]:
        return self._database.read(lambda c: door.ended(c, job_ids)) if job_ids else frozenset()

    def page(self, where: JobFilter) -> JobPage:
        return self._database.read(lambda c: door.page(c, where))

    def request_cancel(self, job_ids: Sequence[str]) -> dict[str, Job]:
        """Many ids take several transactions."""
        jobs: dict[str, Job] = {}
        for some in _portions(job_ids):
            jobs |= self._database.write(partial(door.request_cancel, job_ids=some))
        return jobs

    def revoke(self, job_ids: Sequence[str]) -> None:
        for some in _portions(job_ids):
            self._database.write(partial(door.revoke, job_ids=some))

    def retry(self, job_id: str) -> Job:
        return self._database.write(lambda c: door.retry(c, job_id))

    def purge(self, job_id: str, tenant: str | None = None) -> bool:
        return self._database.write(lambda c: door.purge(c, job_id, tenant))

    def counts(self, tenant: str | None = None) -> dict[str, dict[JobStatus, int]]:
        return self._database.read(lambda c: door.counts(c, tenant))

    def submitted(self, tenant: str, idempotency_key: str) -> bool:
        return self._database.read(lambda c: pressure.submitted(c, tenant, idempotency_key))

    def backlog(self, tenant: str | None = None) -> dict[tuple[str, str], Backlog]:
        return self._database.read(lambda c: pressure.backlog(c, tenant))

    def drains(self, models: Sequence[str]) -> dict[str, Drain]:
        return self._database.read(lambda c: {model: pressure.drain(c, model) for model in models})

    # -- models --------------------------------------------------------------------------------
    def register_model(self, card: ModelCard, text_bundle: bytes) -> None:
        self._database.write(lambda c: catalogue.register_model(c, card, text_bundle))

    def models(self) -> dict[str, ModelCard]:
        return self._database.read(catalogue.models)

    def text_bundle(self, model: str) -> bytes | None:
        return self._database.read(lambda c: catalogue.text_bundle(c, model))

    # -- the worker ----------------------------------------------------------------------------
    def claim(self, claims: Sequence[Claim], owner: str, lease_s: float) -> list[ClaimResult]:
        granted: dict[str, int] = {}
        return self._database.write(lambda c: deliveries.claim(c, claims, owner, lease_s, granted)) if claims else []

    def renew(self, leases: Sequence[Lease], lease_s: float) -> Renewal:
        if not leases:
            return Renewal(frozenset(), frozenset())
        return self._database.write(lambda c: attempts.renew(c, leases, lease_s))

    def commit(self, outcomes: Sequence[Outcome]) -> list[bool]:
        return [job is not None for job in self.record(outcomes)]

    def record(self, outcomes: Sequence[Outcome]) -> list[Job | None]:
        checked = [attempts.checked(outcome) for outcome in outcomes]
        return self._database.write(lambda c: attempts.commit(c, checked)) if checked else []

    def release(self, leases: Sequence[Lease]) -> list[bool]:
        return self._database.write(lambda c: attempts.release(c, leases)) if leases else []

    def reject(
        self, job_id: str, model: str, reason: Reason, message: str, raw: str, traceparent: str | None = None
    ) -> None:
        self._database.write(lambda c: attempts.reject(c, job_id, model, reason, message, raw, traceparent))

    # -- the relay -----------------------------------------------------------------------------
    def outbox(self, limit: int, windows: Windows = DEFAULT_WINDOWS) -> list[Dispatch]:
        """They are this caller's for `dispatches.HOLD_S`."""
        turns = self._database.read(lambda c: lines.turns(c, limit, windows))
        return self._database.write(lambda c: dispatches.take(c, turns)) if turns else []

    def revocations(self, limit: int) -> list[Dispatch]:
        return self._database.read(lambda c: dispatches.revocations(c, limit))

    def raise_aged(self, aging_s: float, windows: Windows = DEFAULT_WINDOWS) -> int:
        return self._database.write(lambda c: lines.raise_aged(c, aging_s, windows))

    def sent(self, ids: Sequence[int]) -> None:
        if ids:
            self._database.write(lambda c: dispatches.sent(c, ids))

    def reap(self, limit: int = 500) -> int:
        return self._database.write(lambda c: dispatches.reap(c, limit))

    def stale_leases(self, for_s: float) -> int:
        return self._database.read(lambda c: dispatches.stale_leases(c, for_s))

    def prune(self, retention: Retention, limit: int = 500) -> Pruned:
        return self._database.write(lambda c: forget(c, retention, limit))

    def expired(self, retention: Retention) -> Pruned:
        return self._database.read(lambda c: forgettable(c, retention))

    def queued(self, model: str, older_than_s: float, limit: int) -> list[Dispatch]:
        return self._database.read(lambda c: dispatches.queued(c, model, older_than_s, limit))

    def sent_counts(self) -> dict[str, dict[JobStatus, int]]:
        return self._database.read(dispatches.sent_counts)

    def republish(self, job_ids: Sequence[str]) -> int:
        """Many ids take several transactions."""
        return sum(self._database.write(partial(dispatches.republish, job_ids=some)) for some in _portions(job_ids))

    def elect(self, role: str, owner: str, ttl_s: float) -> bool:
        return self._database.write(lambda c: dispatches.elect(c, role, owner, ttl_s))

    def revision(self) -> tuple[str | None, str]:
        return self._database.read(migrate.revision), migrate.head()

    def losses(self, job_id: str) -> list[Loss]:
        return self._database.read(lambda c: losses.losses(c, job_id))

    def now(self) -> datetime:
        return self._database.read(lambda c: c.execute(select(db_now())).scalar_one())

    def check(self) -> None:
        self._database.read(integrity.check)

    def close(self) -> None:
        self._database.close()
