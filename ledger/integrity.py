"""Invariants of the whole ledger, each as the condition of what breaks it."""

from __future__ import annotations

from sqlalchemy import ColumnElement, exists, literal, or_, select, union_all
from sqlalchemy.engine import Connection

from ledger.contract import Topic
from ledger.models import JobRow, OutboxRow, ResultRow
from ledger.states import LIVE, QUEUED, RUNNING, SUCCEEDED

_terminal = JobRow.status.not_in(LIVE)
_has_result = exists().where(ResultRow.job_id == JobRow.id)
_has_text = exists().where(ResultRow.job_id == JobRow.id, ResultRow.text.is_not(None))
_has_place = exists().where(OutboxRow.job_id == JobRow.id, OutboxRow.topic == Topic.PUBLISH)

BROKEN: dict[str, ColumnElement[bool]] = {
    "a success without a result": (JobRow.status == SUCCEEDED) & ~_has_text,
    "a success with an error": (JobRow.status == SUCCEEDED) & JobRow.error_code.is_not(None),
    "an end without success and without a reason": (
        _terminal & (JobRow.status != SUCCEEDED) & JobRow.error_code.is_(None)
    ),
    "a live job with a result": ~_terminal & _has_result,
    "a live job with an error": ~_terminal & JobRow.error_code.is_not(None),
    "a lease without work, or work without a lease": ((JobRow.status == RUNNING) != JobRow.lease_until.is_not(None)),
    "work without a worker, or without an attempt": (
        (JobRow.status == RUNNING) & or_(JobRow.worker.is_(None), JobRow.attempt < 1, JobRow.fence < 1)
    ),
    "an end without its time, or a time without an end": _terminal != JobRow.finished_at.is_not(None),
    "attempts out of bounds": or_(JobRow.attempt < 0, JobRow.attempt > JobRow.max_attempts),
    "a queued job that used up its attempts": (JobRow.status == QUEUED) & (JobRow.attempt >= JobRow.max_attempts),
    "a queued job that is to be cancelled": (JobRow.status == QUEUED) & JobRow.cancel_requested,
    "a place in the queue without a queued job": (JobRow.status != QUEUED) & _has_place,
    "a queued job without a place in the queue": (JobRow.status == QUEUED) & ~_has_place,
}

_FINDINGS = union_all(
    *(select(literal(what).label("what"), JobRow.id, JobRow.status).where(breaks) for what, breaks in BROKEN.items())
).limit(20)


def check(connection: Connection) -> None:
    """Raise AssertionError that names broken invariants and jobs that break them."""
    if found := connection.execute(_FINDINGS).all():
        raise AssertionError("; ".join(f"{row.what}: {row.id} ({row.status})" for row in found))
