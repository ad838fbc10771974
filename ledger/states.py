"""The states of a job: which may follow which, and the one way to change one."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.contract import JobStatus
from sqlalchemy import ColumnElement, Update, literal_column, or_, update

from ledger.clock import db_now
from ledger.contract import IllegalTransition
from ledger.models import JobRow

QUEUED, RUNNING = JobStatus.QUEUED, JobStatus.RUNNING
SUCCEEDED, FAILED = JobStatus.SUCCEEDED, JobStatus.FAILED
CANCELLED, EXPIRED = JobStatus.CANCELLED, JobStatus.EXPIRED

LIVE = (QUEUED, RUNNING)
RETRYABLE = (FAILED, CANCELLED, EXPIRED)

TRANSITIONS: dict[JobStatus, frozenset[JobStatus]] = {
    QUEUED: frozenset({RUNNING, FAILED, CANCELLED, EXPIRED}),
    RUNNING: frozenset({RUNNING, QUEUED, SUCCEEDED, FAILED, CANCELLED, EXPIRED}),
    SUCCEEDED: frozenset(),
    FAILED: frozenset({QUEUED}),
    CANCELLED: frozenset({QUEUED}),
    EXPIRED: frozenset({QUEUED}),
}
"""What may follow each state. `running` follows itself when another worker takes an expired lease over; the way
back from an end is a retry, which somebody has to ask for."""


def is_in(status: JobStatus) -> ColumnElement[bool]:
    """The condition that a job is in `status`, written into the SQL text, so that partial indexes serve it."""
    return JobRow.status == literal_column(f"'{status.value}'")


def move(sources: Iterable[JobStatus], target: JobStatus) -> Update:
    """UPDATE of jobs in one of `sources` to `target`, with the columns that the target state implies.

    The caller narrows it to its jobs, and sets `lease_until` for `running`.
    """
    sources = tuple(sources)
    for source in sources:
        if target not in TRANSITIONS[source]:
            raise IllegalTransition(f"a job can't go from {source} to {target}")
    change = update(JobRow).where(or_(*(is_in(source) for source in sources))).values(status=target)
    if target is RUNNING:
        return change.values(started_at=db_now())
    if target is QUEUED:
        return change.values(queued_at=db_now(), started_at=None, finished_at=None, lease_until=None, worker=None)
    return change.values(finished_at=db_now(), lease_until=None)
