"""The states of a job: which may follow which, and the one way to change one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.contract import JobStatus
from sqlalchemy import ColumnElement, Update, literal_column, update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

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


class still_in(FunctionElement[Any]):  # noqa: N801 (it reads as an SQL operator)
    """Whether jobs that are named by their ids are in one of these states.

    No index is to serve it: SQLite would sooner read all jobs in those states, a million, than look up a few hundred.
    """

    inherit_cache = True

    def __init__(self, *statuses: JobStatus) -> None:
        super().__init__(JobRow.status, *(literal_column(f"'{status.value}'") for status in statuses))


@compiles(still_in)
def _still_in(element: still_in, compiler: SQLCompiler, **kw: Any) -> str:
    status, *wanted = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"{status} IN ({', '.join(wanted)})"


@compiles(still_in, "sqlite")
def _sqlite_still_in(element: still_in, compiler: SQLCompiler, **kw: Any) -> str:
    return f"+{_still_in(element, compiler, **kw)}"


def move(sources: Iterable[JobStatus], target: JobStatus) -> Update:
    """UPDATE of jobs in one of `sources` to `target`, with the columns that the target state implies.

    The caller names its jobs by their ids, and sets `lease_until` for `running`.
    """
    sources = tuple(sources)
    for source in sources:
        if target not in TRANSITIONS[source]:
            raise IllegalTransition(f"a job can't go from {source} to {target}")
    change = update(JobRow).where(still_in(*sources)).values(status=target)
    if target is RUNNING:
        return change.values(started_at=db_now())
    if target is QUEUED:
        return change.values(queued_at=db_now(), started_at=None, finished_at=None, lease_until=None, worker=None)
    return change.values(finished_at=db_now(), lease_until=None)
