"""What an attempt may do with its lease: to be renewed, to write the job's outcome, to hand the job back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headrace.contract import JobStatus, Priority, Reason, Timings
from sqlalchemy import Row, bindparam, insert, select, tuple_, update
from sqlalchemy.engine import Connection

from ledger.clock import db_now
from ledger.contract import Lease, Outcome, Renewal, Topic
from ledger.models import JobRow, ResultRow
from ledger.rows import RESULT_FIELDS, WHY, dispatch, end, insert_jobs, lock_jobs
from ledger.states import CANCELLED, EXPIRED, FAILED, QUEUED, RUNNING, SUCCEEDED, move

_MAX_RAW_CHARS = 65_536
_REASONS = {CANCELLED: Reason.CANCELLED, EXPIRED: Reason.DEADLINE_EXCEEDED}

_COMMIT = {
    status: move((RUNNING,), status)
    .where(JobRow.id == bindparam("job_id"), JobRow.fence == bindparam("held"))
    .values(
        {
            name: bindparam(name)
            for name in (
                "error_code",
                "error_message",
                "queue_time_ms",
                "time_to_first_token_ms",
                "generation_time_ms",
                "total_time_ms",
                "prompt_tokens",
                "completion_tokens",
            )
        }
    )
    for status in JobStatus
    if status.terminal
}
_INSERT_RESULTS = insert(ResultRow)


def renew(connection: Connection, leases: Sequence[Lease], lease_s: float) -> Renewal:
    ids = [lease.job_id for lease in leases]
    renewed = connection.execute(
        update(JobRow)
        .where(JobRow.status == RUNNING, JobRow.id.in_(ids))
        .where(tuple_(JobRow.id, JobRow.fence).in_([(lease.job_id, lease.fence) for lease in leases]))
        .values(lease_until=db_now(lease_s))
        .returning(JobRow.id, JobRow.cancel_requested)
    ).all()
    return Renewal(
        lost=frozenset(ids) - {row.id for row in renewed},
        cancelled=frozenset(row.id for row in renewed if row.cancel_requested),
    )


def checked(outcome: Outcome) -> Outcome:
    """The outcome, if it is one: raises ValueError for a state that is no end, a success with no result, and so on."""
    job_id, status = outcome.lease.job_id, outcome.status
    if not status.terminal:
        raise ValueError(f"job {job_id}: {status} is no outcome")
    if status is SUCCEEDED and (outcome.result is None or outcome.reason is not None):
        raise ValueError(f"job {job_id}: a success has a result and no reason")
    if status is FAILED and outcome.reason is None:
        raise ValueError(f"job {job_id}: a failure has a reason")
    return outcome


def commit(connection: Connection, outcomes: Sequence[Outcome]) -> list[bool]:
    rows = lock_jobs(
        connection, (o.lease.job_id for o in outcomes), JobRow.status, JobRow.fence, JobRow.attempt, JobRow.accepted_at
    )
    written: list[bool] = []
    taken: dict[str, Outcome] = {}
    for outcome in outcomes:
        row = rows.get(outcome.lease.job_id)
        if row is None or row.fence != outcome.lease.fence:
            written.append(False)
        elif row.id in taken:
            written.append(taken[row.id].status is outcome.status)
        elif row.status is RUNNING:
            taken[row.id] = outcome
            written.append(True)
        else:
            written.append(row.status is outcome.status)
    if taken:
        _write(connection, [(rows[job_id], outcome) for job_id, outcome in taken.items()])
    return written


def _write(connection: Connection, ends: Sequence[tuple[Row[Any], Outcome]]) -> None:
    changes: dict[JobStatus, list[dict[str, Any]]] = {}
    results = []
    for row, outcome in ends:
        timings = outcome.timings or Timings()
        timings = timings.model_copy(
            update={
                "attempts": row.attempt,
                "total_time_ms": timings.total_time_ms or 1000 * (row.now - row.accepted_at).total_seconds(),
            }
        )
        result, usage = outcome.result, outcome.result.usage if outcome.result is not None else None
        reason = outcome.reason or _REASONS.get(outcome.status)
        changes.setdefault(outcome.status, []).append(
            {
                "job_id": row.id,
                "held": row.fence,
                "error_code": reason,
                "error_message": outcome.message or WHY.get(reason, f"the job failed: {reason}")
                if reason is not None
                else None,
                "queue_time_ms": timings.queue_time_ms,
                "time_to_first_token_ms": timings.time_to_first_token_ms,
                "generation_time_ms": timings.generation_time_ms,
                "total_time_ms": timings.total_time_ms,
                "prompt_tokens": usage.prompt_tokens if usage is not None else None,
                "completion_tokens": usage.completion_tokens if usage is not None else None,
            }
        )
        brought = result.model_dump(mode="json") if result is not None else {}
        results.append(
            {
                "job_id": row.id,
                **{name: brought.get(name) for name in RESULT_FIELDS},
                "choices": brought.get("choices") or None,
                "timings": {name: value for name, value in timings.model_dump().items() if _tellable(value)},
            }
        )
    for status, rows in changes.items():
        connection.execute(_COMMIT[status], rows)
    connection.execute(_INSERT_RESULTS, results)


def _tellable(value: object) -> bool:
    """Whether a timing says anything, in JSON: there is no NaN and no infinity."""
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def release(connection: Connection, leases: Sequence[Lease]) -> list[bool]:
    rows = lock_jobs(
        connection, (lease.job_id for lease in leases), JobRow.status, JobRow.fence, JobRow.cancel_requested
    )
    held = {lease.job_id for lease in leases if lease.job_id in rows and rows[lease.job_id].fence == lease.fence}
    running = [job_id for job_id in sorted(held) if rows[job_id].status is RUNNING]
    end(connection, [i for i in running if rows[i].cancel_requested], CANCELLED, Reason.CANCELLED)
    back = [i for i in running if not rows[i].cancel_requested]
    if back:
        requeue = move((RUNNING,), QUEUED).where(JobRow.id.in_(back))
        connection.execute(requeue.values(attempt=JobRow.attempt - 1))
        dispatch(connection, Topic.PUBLISH, back)
    return [
        lease.job_id in held and rows[lease.job_id].fence == lease.fence and not rows[lease.job_id].status.terminal
        for lease in leases
    ]


def reject(connection: Connection, job_id: str, model: str, reason: Reason, message: str, raw: str) -> None:
    now = connection.execute(select(db_now())).scalar_one()
    insert_jobs(
        connection,
        [
            {
                "id": job_id,
                "tenant": "default",
                "model": model,
                "status": FAILED,
                "priority": Priority.NORMAL,
                "max_attempts": 1,
                "created_at": now,
                "accepted_at": now,
                "queued_at": now,
                "finished_at": now,
                "error_code": reason,
                "error_message": message,
                "metadata": {},
                "raw": raw[:_MAX_RAW_CHARS],
            }
        ],
    )
