"""What an attempt may do with its lease: to be renewed, to write the job's outcome, to hand the job back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headrace.contract import Job, JobError, JobStatus, Priority, Reason, Timings
from sqlalchemy import Row, bindparam, insert, select, tuple_, update
from sqlalchemy.engine import Connection

from ledger import door
from ledger.bulk import ForEach, given
from ledger.clock import db_now
from ledger.contract import Lease, Outcome, Renewal, Topic
from ledger.models import JobRow, ResultRow
from ledger.rows import JOB_COLUMNS, MEASURED, WHY, dispatch, end, insert_jobs, lock_jobs, shown
from ledger.states import CANCELLED, EXPIRED, FAILED, QUEUED, RUNNING, SUCCEEDED, move, still_in

_MAX_RAW_CHARS = 65_536
_REASONS = {CANCELLED: Reason.CANCELLED, EXPIRED: Reason.DEADLINE_EXCEEDED}

_LOCKED = (*JOB_COLUMNS, JobRow.fence, JobRow.accepted_at)
_held = (
    JobRow.id == bindparam("job_id", type_=JobRow.id.type),
    JobRow.fence == bindparam("held", type_=JobRow.fence.type),
)
_END = {
    status: ForEach(
        move((RUNNING,), status)
        .where(*_held)
        .values(given(JobRow, ("finished_at", "error_code", "error_message", *MEASURED)))
    )
    for status in JobStatus
    if status.terminal
}
_BRING = ForEach(insert(ResultRow).values(given(ResultRow, ResultRow.__table__.c.keys())))


def renew(connection: Connection, leases: Sequence[Lease], lease_s: float) -> Renewal:
    ids = [lease.job_id for lease in leases]
    renewed = connection.execute(
        update(JobRow)
        .where(still_in(RUNNING), JobRow.id.in_(ids))
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


def commit(connection: Connection, outcomes: Sequence[Outcome]) -> list[Job | None]:
    """The jobs as they have ended; None where the lease was lost."""
    rows = lock_jobs(connection, (o.lease.job_id for o in outcomes), *_LOCKED)
    taken: dict[str, Outcome] = {}
    ended: set[str] = set()
    """Written by an earlier try, whose answer was lost."""
    written: list[bool] = []
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
            ended.add(row.id)
            written.append(row.status is outcome.status)
    jobs = _write(connection, [(rows[job_id], outcome) for job_id, outcome in taken.items()]) if taken else {}
    if ended:
        jobs |= door.jobs(connection, list(ended))
    return [jobs[o.lease.job_id] if ok else None for o, ok in zip(outcomes, written, strict=True)]


def _write(connection: Connection, ends: Sequence[tuple[Row[Any], Outcome]]) -> dict[str, Job]:
    changes: dict[JobStatus, list[dict[str, Any]]] = {}
    results = []
    jobs = {}
    for row, outcome in ends:
        job = ended_job(row, outcome)
        jobs[job.id] = job
        usage = job.result.usage if job.result is not None else None
        timings = job.timings.model_dump(exclude_none=True) if job.timings is not None else {}
        changes.setdefault(job.status, []).append(
            {
                "job_id": row.id,
                "held": row.fence,
                "finished_at": row.now,
                "error_code": job.error.code if job.error is not None else None,
                "error_message": job.error.message if job.error is not None else None,
                **{name: timings.get(name) for name in MEASURED},
                "prompt_tokens": usage.prompt_tokens if usage is not None else None,
                "completion_tokens": usage.completion_tokens if usage is not None else None,
            }
        )
        brought = job.result.model_dump(mode="json") if job.result is not None else {}
        results.append(
            brought
            | {"job_id": row.id, "choices": brought.get("choices") or None}
            | {"timings": {name: value for name, value in timings.items() if _tellable(value)}}
        )
    for status, changed in changes.items():
        _END[status].run(connection, changed)
    _BRING.run(connection, results)
    return jobs


def ended_job(row: Row[Any], outcome: Outcome) -> Job:
    """The running job of this row, as the outcome ends it now."""
    timings = outcome.timings or Timings()
    total_ms = timings.total_time_ms or 1000 * (row.now - row.accepted_at).total_seconds()
    reason = outcome.reason or _REASONS.get(outcome.status)
    error = None
    if reason is not None:
        error = JobError(code=reason, message=outcome.message or WHY.get(reason, f"the job failed: {reason}"))
    return shown(
        row,
        status=outcome.status,
        finished_at=row.now,
        result=outcome.result,
        error=error,
        timings=timings.model_copy(update={"attempts": row.attempt, "total_time_ms": total_ms}),
    )


def _tellable(value: object) -> bool:
    """Whether JSON has the value: there is no NaN and no infinity."""
    return not isinstance(value, float) or math.isfinite(value)


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


def reject(
    connection: Connection,
    job_id: str,
    model: str,
    reason: Reason,
    message: str,
    raw: str,
    traceparent: str | None = None,
) -> None:
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
                "traceparent": traceparent,
                "raw": raw[:_MAX_RAW_CHARS],
            }
        ],
    )
