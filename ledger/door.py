"""What producers ask of the ledger: submit, look, cancel, retry."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from headrace.contract import Job, JobPage, JobRequest, JobStatus, Reason, fingerprint
from sqlalchemy import (
    ColumnElement,
    Select,
    delete,
    func,
    literal,
    literal_column,
    select,
    true,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from ledger.bulk import one_of
from ledger.clock import UtcTime, db_now
from ledger.contract import IdempotencyConflict, IllegalTransition, JobFilter, Submission, Topic
from ledger.models import JobRow, OutboxRow, ResultRow, RevocationRow
from ledger.rows import dispatch, end, insert_jobs, lock_jobs, select_jobs, to_job
from ledger.states import CANCELLED, QUEUED, RETRYABLE, RUNNING, move, still_in

_TEXT_CHARS = 4
"""Of one token, where tokens are guessed."""
_MOST_TOKENS = 2**31
"""No context of any model is as long."""
ENDED_CHUNK = 1000
"""Ids in one statement."""


def with_seed(request: JobRequest) -> JobRequest:
    """The request with a seed: its own, or one drawn now."""
    return request if request.seed is not None else request.model_copy(update={"seed": secrets.randbits(63)})


def guessed_tokens(request: JobRequest) -> int:
    """Tokens that the job may take, if nobody has counted its prompt's and looked at its model's limits."""
    parts = [m.content for m in request.messages] if request.messages is not None else [request.prompt or ""]
    prompt_tokens = sum(-(-len(part) // _TEXT_CHARS) if isinstance(part, str) else len(part) for part in parts)
    return min(prompt_tokens + request.n * request.max_tokens, _MOST_TOKENS)


def new_row(
    job_id: str, asked: JobRequest, seeded: JobRequest, now: datetime, tokens: int | None = None
) -> dict[str, Any]:
    """Columns of a job that is queued now. The fingerprint is that of the request before its seed was drawn."""
    body = asked.body()
    return {
        "id": job_id,
        "tenant": asked.tenant,
        "model": asked.model,
        "status": QUEUED,
        "priority": asked.priority,
        "attempt": 0,
        "max_attempts": asked.max_attempts,
        "fence": 0,
        "cancel_requested": False,
        "created_at": now,
        "accepted_at": now,
        "queued_at": now,
        "deadline": asked.deadline_from(now),
        "tokens": guessed_tokens(asked) if tokens is None else tokens,
        "idempotency_key": asked.idempotency_key,
        "fingerprint": fingerprint(body),
        "metadata": asked.metadata,
        "traceparent": asked.traceparent,
        "request": body | {"seed": seeded.seed},
    }


def submit(
    connection: Connection,
    asked: JobRequest,
    seeded: JobRequest,
    job_id: str,
    own_id: bool = False,
    tokens: int | None = None,
) -> Submission:
    """Write the job and its outbox row. `own_id`: the id is fresh, so a row that has it is this very submission's."""
    now = connection.execute(select(db_now())).scalar_one()
    row = new_row(job_id, asked, seeded, now, tokens)
    if row["deadline"] is not None and row["deadline"] <= now:
        raise ValueError(f"the deadline {row['deadline'].isoformat()} has passed")
    if insert_jobs(connection, [row]):
        dispatch(connection, Topic.PUBLISH, [job_id])
        return Submission(fetch(connection, job_id), created=True)
    found = _holder(connection, asked, job_id)
    if found.fingerprint != row["fingerprint"] or found.tenant != asked.tenant:
        what = "job id" if found.id == job_id else "idempotency key"
        raise IdempotencyConflict(f"this {what} was used before with another request")
    return Submission(fetch(connection, found.id), created=own_id and found.id == job_id)


def submit_many(connection: Connection, asked: Sequence[tuple[str, JobRequest, JobRequest]]) -> list[Submission]:
    """Write many jobs and their outbox rows in a few statements: of each its fresh id, request, and request with seed.

    All of them or, if one is refused, none. One whose idempotency key is in use is looked up like a single one.
    """
    now = connection.execute(select(db_now())).scalar_one()
    rows = {job_id: new_row(job_id, request, seeded, now) for job_id, request, seeded in asked}
    for row in rows.values():
        if row["deadline"] is not None and row["deadline"] <= now:
            raise ValueError(f"the deadline {row['deadline'].isoformat()} has passed")
    written = insert_jobs(connection, list(rows.values()))
    dispatch(connection, Topic.PUBLISH, written)
    found = jobs(connection, list(written))
    return [
        Submission(found[job_id], created=True)
        if job_id in found
        else submit(connection, request, seeded, job_id, own_id=True)
        for job_id, request, seeded in asked
    ]


def _holder(connection: Connection, asked: JobRequest, job_id: str) -> Any:
    """The job that stands in the way of a new one: the idempotency key's, else the id's."""
    columns = select(JobRow.id, JobRow.tenant, JobRow.fingerprint)
    if asked.idempotency_key is not None:
        keyed = columns.where(JobRow.tenant == asked.tenant, JobRow.idempotency_key == asked.idempotency_key)
        if (found := connection.execute(keyed).first()) is not None:
            return found
    return connection.execute(columns.where(JobRow.id == job_id)).one()


def get(connection: Connection, job_id: str, tenant: str | None = None) -> Job | None:
    statement = select_jobs().where(JobRow.id == job_id)
    if tenant is not None:
        statement = statement.where(JobRow.tenant == tenant)
    row = connection.execute(statement).first()
    return to_job(row) if row is not None else None


_JOBS = select_jobs().where(one_of(JobRow.id))


def jobs(connection: Connection, job_ids: Sequence[str]) -> dict[str, Job]:
    return {row.id: to_job(row) for row in connection.execute(_JOBS, {"ids": list(job_ids)})}


def fetch(connection: Connection, job_id: str) -> Job:
    """A job that is known to exist."""
    return to_job(connection.execute(select_jobs().where(JobRow.id == job_id)).one())


def ended(connection: Connection, job_ids: Sequence[str]) -> frozenset[str]:
    terminal = still_in(*(status for status in JobStatus if status.terminal))
    found: set[str] = set()
    for start in range(0, len(job_ids), ENDED_CHUNK):
        asked = JobRow.id.in_(job_ids[start : start + ENDED_CHUNK])
        found.update(connection.execute(select(JobRow.id).where(asked, terminal)).scalars())
    return frozenset(found)


def page(connection: Connection, where: JobFilter) -> JobPage:
    wanted = []
    if where.status is not None:
        wanted.append(JobRow.status == where.status)
    if where.model is not None:
        wanted.append(JobRow.model == where.model)
    if where.tenant is not None:
        wanted.append(JobRow.tenant == where.tenant)
    if where.reason is not None:
        wanted.append(ended_for(where.reason))
    if where.ended_before_s is not None:
        wanted.append(JobRow.finished_at <= db_now(-where.ended_before_s))
    statement = select_jobs(whole=False).where(*wanted)
    if where.after is not None:
        statement = statement.where(
            tuple_(JobRow.created_at, JobRow.id) < _position(connection, where.after, where.tenant)
        )
    newest_first = statement.order_by(JobRow.created_at.desc(), JobRow.id.desc()).limit(where.limit + 1)
    rows = connection.execute(newest_first).all()
    jobs = [to_job(row) for row in rows[: where.limit]]
    return JobPage(
        data=jobs,
        first_id=jobs[0].id if jobs else None,
        last_id=jobs[-1].id if jobs else None,
        has_more=len(rows) > where.limit,
    )


def _position(connection: Connection, job_id: str, tenant: str | None) -> Any:
    statement = select(JobRow.created_at, JobRow.id).where(JobRow.id == job_id)
    if tenant is not None:
        statement = statement.where(JobRow.tenant == tenant)
    row = connection.execute(statement).first()
    if row is None:
        raise ValueError(f"there is no job {job_id!r} to list after")
    return tuple_(literal(row.created_at, UtcTime), literal(row.id))


def request_cancel(connection: Connection, job_ids: Sequence[str]) -> dict[str, Job]:
    rows = lock_jobs(connection, job_ids, JobRow.status, JobRow.cancel_requested)
    end(connection, [i for i, row in rows.items() if row.status is QUEUED], CANCELLED, Reason.CANCELLED)
    told = [i for i, row in rows.items() if row.status is RUNNING and not row.cancel_requested]
    if told:
        connection.execute(update(JobRow).where(JobRow.id.in_(told)).values(cancel_requested=True))
        dispatch(connection, Topic.REVOKE, told)
    jobs = connection.execute(select_jobs().where(JobRow.id.in_(list(rows))))
    return {row.id: to_job(row) for row in jobs}


def revoke(connection: Connection, job_ids: Sequence[str]) -> None:
    known = set(connection.execute(select(JobRow.id).where(JobRow.id.in_(job_ids))).scalars())
    insert_into = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    remembered = insert_into(RevocationRow).values(asked_at=db_now()).on_conflict_do_nothing()
    if unknown := sorted(set(job_ids) - known):
        connection.execute(remembered, [{"job_id": job_id} for job_id in unknown])


def retry(connection: Connection, job_id: str) -> Job:
    row = lock_jobs(connection, [job_id], JobRow.status, JobRow.request, JobRow.deadline).get(job_id)
    if row is None:
        raise KeyError(job_id)
    if row.status not in RETRYABLE:
        raise IllegalTransition(f"job {job_id} is {row.status}: only a job that ended without success can be retried")
    if row.request is None:
        raise IllegalTransition(f"job {job_id} never was a valid request")
    deadline = row.deadline
    if row.request.get("ttl_s") is not None:
        deadline = JobRequest.model_validate(row.request).deadline_from(row.now)
    if deadline is not None and deadline <= row.now:
        raise IllegalTransition(f"job {job_id} has a deadline that has passed")
    connection.execute(delete(ResultRow).where(ResultRow.job_id == job_id))
    connection.execute(delete(OutboxRow).where(OutboxRow.job_id == job_id))
    again = move(RETRYABLE, QUEUED).where(JobRow.id == job_id)
    connection.execute(
        again.values(
            attempt=0,
            fence=JobRow.fence + 1,
            cancel_requested=False,
            accepted_at=db_now(),
            deadline=deadline,
            error_code=None,
            error_message=None,
            queue_time_ms=None,
            time_to_first_token_ms=None,
            generation_time_ms=None,
            total_time_ms=None,
            prompt_tokens=None,
            completion_tokens=None,
        )
    )
    dispatch(connection, Topic.PUBLISH, [job_id])
    return fetch(connection, job_id)


def ended_for(reason: Reason) -> ColumnElement[bool]:
    """The condition that a job ended for a reason, written into the SQL text, so that a partial index serves it."""
    return JobRow.error_code == literal_column(f"'{reason.value}'")


def purge(connection: Connection, job_id: str, tenant: str | None) -> bool:
    dead = delete(JobRow).where(JobRow.id == job_id, ended_for(Reason.DEAD_LETTER))
    if tenant is not None:
        dead = dead.where(JobRow.tenant == tenant)
    return connection.execute(dead.returning(JobRow.id)).first() is not None


def _counted() -> Select[Any]:
    """Jobs of each model in each state, each number read off its own stretch of an index: grouping takes longer."""
    models = select(func.min(JobRow.model).label("model")).cte("models", recursive=True)
    following = select(func.min(JobRow.model)).where(JobRow.model > models.c.model).correlate(models).scalar_subquery()
    models = models.union_all(select(following).where(models.c.model.is_not(None)))
    each = [select(literal(status, JobRow.status.type).label("status")) for status in JobStatus]
    states = union_all(*each).subquery("states")
    found = select(func.count()).where(JobRow.model == models.c.model, JobRow.status == states.c.status)
    number = found.correlate(models, states).scalar_subquery()
    each_in_each = models.join(states, true())
    return select(models.c.model, states.c.status, number).select_from(each_in_each).where(models.c.model.is_not(None))


_COUNTED = _counted()
_GROUPED = select(JobRow.model, JobRow.status, func.count()).group_by(JobRow.model, JobRow.status)


def counts(connection: Connection, tenant: str | None = None) -> dict[str, dict[JobStatus, int]]:
    found: dict[str, dict[JobStatus, int]] = {}
    asked = _COUNTED if tenant is None else _GROUPED.where(JobRow.tenant == tenant)
    for model, status, count in connection.execute(asked):
        if count:
            found.setdefault(model, {})[status] = count
    return found
