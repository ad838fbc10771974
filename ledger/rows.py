"""Statements that several sides of the ledger share: reading jobs, locking them, ending them, queueing messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from headrace.contract import Job, JobError, JobResult, JobStatus, Reason, Timings
from sqlalchemy import Result, Row, Select, delete, insert, literal, null, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from ledger.bulk import ForEach, given, one_of
from ledger.clock import db_now
from ledger.contract import Topic
from ledger.lines import LINE
from ledger.models import JobRow, OutboxRow, ResultRow
from ledger.states import LIVE, move

JOB_COLUMNS = (
    JobRow.model,
    JobRow.status,
    JobRow.priority,
    JobRow.tenant,
    JobRow.labels.label("labels"),
    JobRow.created_at,
    JobRow.started_at,
    JobRow.deadline,
    JobRow.attempt,
    JobRow.max_attempts,
    JobRow.cancel_requested,
    JobRow.traceparent,
    JobRow.worker,
)
"""What every door shows of a job that has not ended, besides its id."""
_SHOWN = (
    JobRow.id,
    *JOB_COLUMNS,
    JobRow.finished_at,
    JobRow.error_code,
    JobRow.error_message,
    ResultRow.text,
    ResultRow.token_ids,
    ResultRow.finish_reason,
    ResultRow.stop_reason,
    ResultRow.usage,
    ResultRow.timings,
)
_LARGE = (ResultRow.choices, ResultRow.logprobs, ResultRow.prompt_logprobs, ResultRow.embedding)
"""Left out of lists of jobs: a hundred of them would be hundreds of megabytes."""
MEASURED = (
    "queue_time_ms",
    "time_to_first_token_ms",
    "generation_time_ms",
    "total_time_ms",
    "prompt_tokens",
    "completion_tokens",
)
"""Columns that only a commit fills in."""
RESULT_FIELDS = tuple(JobResult.model_fields)
"""Columns of a result that are the fields of what the doors show."""

WHY = {
    Reason.CANCELLED: "the job was cancelled",
    Reason.DEADLINE_EXCEEDED: "the job's deadline passed",
    Reason.DEAD_LETTER: "the job's attempts are used up: its workers died or lost it each time",
}
"""What is told of an end that came with no message of its own."""


def select_jobs(*, whole: bool = True) -> Select[Any]:
    """Jobs with their results, for `to_job`; without what is large of them unless they are `whole`."""
    columns = (*_SHOWN, *_LARGE) if whole else _SHOWN
    return select(*columns).select_from(JobRow).outerjoin(ResultRow, ResultRow.job_id == JobRow.id)


def to_job(row: Row[Any]) -> Job:
    """The job as the doors show it."""
    result = None
    if row.text is not None:
        stored = {name: value for name, value in row._mapping.items() if name in RESULT_FIELDS and value is not None}
        result = JobResult.model_validate(stored)
    error = None
    if row.error_code is not None:
        error = JobError(code=row.error_code, message=row.error_message or "")
    timings = Timings(**row.timings) if row.timings is not None else None
    return shown(row, status=row.status, finished_at=row.finished_at, result=result, error=error, timings=timings)


def shown(
    row: Row[Any],
    *,
    status: JobStatus,
    finished_at: datetime | None,
    result: JobResult | None,
    error: JobError | None,
    timings: Timings | None,
) -> Job:
    """A job of these parts, and of `JOB_COLUMNS` in a row."""
    return Job(
        id=row.id,
        model=row.model,
        status=status,
        priority=row.priority,
        tenant=row.tenant,
        metadata=row.labels,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=finished_at,
        deadline=row.deadline,
        attempt=row.attempt,
        max_attempts=row.max_attempts,
        cancel_requested=row.cancel_requested,
        traceparent=row.traceparent,
        worker=row.worker,
        result=result,
        error=error,
        timings=timings,
    )


_NEW = given(JobRow, (column.name for column in JobRow.__table__.c if column.name not in MEASURED))
_INSERT_EACH = ForEach(sqlite.insert(JobRow).values(_NEW).on_conflict_do_nothing())
_INSERT = postgresql.insert(JobRow).on_conflict_do_nothing().returning(JobRow.id)
_UNSAID = {"attempt": 0, "fence": 0, "cancel_requested": False, "metadata": {}}
_PRESENT = select(JobRow.id).where(one_of(JobRow.id))
_locks: dict[tuple[str, ...], Select[Any]] = {}
"""Statements that are run thousands of times a second are made once: SQLAlchemy recognises the object."""


def insert_jobs(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Insert each job whose id and idempotency key are free. Returns the ids of those."""
    if connection.dialect.name != "sqlite":
        return set(connection.execute(_INSERT, list(rows)).scalars())
    # Nobody else writes to SQLite during this transaction: what is there afterwards and wasn't before is new.
    ids = {"ids": [row["id"] for row in rows]}
    before = set(connection.execute(_PRESENT, ids).scalars())
    written = _INSERT_EACH.run(connection, [{**_UNSAID, **row} for row in rows])
    if written == len(rows):
        return set(ids["ids"])
    return set(connection.execute(_PRESENT, ids).scalars()) - before


def lock_jobs(connection: Connection, ids: Iterable[str], *columns: Any) -> dict[str, Row[Any]]:
    """The rows of these jobs with the database's `now`, locked until the transaction ends, in one order for all."""
    names = tuple(column.key for column in columns)
    if names not in _locks:
        statement = select(*columns, JobRow.id, db_now().label("now")).where(one_of(JobRow.id))
        _locks[names] = statement.order_by(JobRow.id).with_for_update(of=JobRow)
    rows: Result[Any] = connection.execute(_locks[names], {"ids": list(set(ids))})
    return {row.id: row for row in rows}


def end(
    connection: Connection, ids: Sequence[str], status: JobStatus, reason: Reason, message: str | None = None
) -> None:
    """End jobs that are locked and that no worker's outcome will end. No lease survives it, nor a message to send."""
    if not ids:
        return
    ended = move(LIVE, status).where(JobRow.id.in_(ids))
    connection.execute(ended.values(fence=JobRow.fence + 1, error_code=reason, error_message=message or WHY[reason]))
    drop_publications(connection, ids)


_DROP = delete(OutboxRow).where(one_of(OutboxRow.job_id), OutboxRow.topic == Topic.PUBLISH)


def drop_publications(connection: Connection, ids: Sequence[str]) -> None:
    """Take these jobs out of the queue: they are running, or have ended."""
    connection.execute(_DROP, {"ids": ids})


def dispatch(connection: Connection, topic: Topic, ids: Iterable[str], delay_s: float = 0.0) -> None:
    """Put a message about each job into the outbox. Always a new row: an older one may be on its way already."""
    line = LINE if topic is Topic.PUBLISH else null()
    due = select(literal(topic.value), JobRow.id, line, db_now(delay_s)).where(JobRow.id.in_(list(ids)))
    rows = insert(OutboxRow).from_select(
        ["topic", "job_id", "line", "due_at"], due.order_by(JobRow.accepted_at, JobRow.id)
    )
    connection.execute(rows)
