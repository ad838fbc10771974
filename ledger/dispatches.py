"""What relays ask of the ledger: messages to send, jobs that nobody holds, and who does what."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from headrace.contract import JobStatus, Reason
from sqlalchemy import bindparam, delete, exists, func, literal, or_, select, union_all, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from ledger.clock import UtcTime, db_now, seconds
from ledger.contract import Dispatch, Topic, Verdict
from ledger.deliveries import ENDS, verdict_on
from ledger.lines import Line
from ledger.losses import clear_companions, lose
from ledger.models import JobRow, OutboxRow, RoleRow
from ledger.rows import dispatch, drop_publications, end
from ledger.states import EXPIRED, QUEUED, RUNNING, is_in, move, still_in

HOLD_S = 3.0
"""A relay that took outbox rows and didn't report them sent loses them to others after this long."""
_MAX_BACKOFF_S = 60.0


_MESSAGES = (
    select(
        OutboxRow.id,
        OutboxRow.topic,
        OutboxRow.line,
        OutboxRow.job_id,
        JobRow.model,
        JobRow.priority,
        JobRow.fence,
        JobRow.traceparent,
    )
    .join(JobRow, JobRow.id == OutboxRow.job_id)
    .where(OutboxRow.due_at <= db_now(), OutboxRow.sent_at.is_(None))
)
_REVOCATIONS = (
    _MESSAGES.where(OutboxRow.line.is_(None), OutboxRow.topic == Topic.REVOKE)
    .order_by(OutboxRow.due_at, OutboxRow.id)
    .limit(bindparam("most"))
)


def revocations(connection: Connection, limit: int) -> list[Dispatch]:
    """What is to be stopped, the oldest first. It is nobody's own: to be told twice stops nothing else."""
    rows = connection.execute(_REVOCATIONS, {"most": limit})
    return [Dispatch(row.id, row.topic, row.job_id, row.model, row.priority, row.fence) for row in rows]


def take(connection: Connection, ids: Sequence[int]) -> list[Dispatch]:
    """Take those of the messages that are still to be sent, in the order of `ids`: no other relay sees them for
    `HOLD_S`."""
    taken = connection.execute(
        _MESSAGES.where(OutboxRow.id.in_(ids)).with_for_update(of=OutboxRow, skip_locked=True)
    ).all()
    if taken:
        held = update(OutboxRow).where(OutboxRow.id.in_([row.id for row in taken]))
        connection.execute(held.values(due_at=db_now(HOLD_S)))
    place = {row_id: place for place, row_id in enumerate(ids)}
    return [
        Dispatch(
            row.id,
            row.topic,
            row.job_id,
            row.model,
            Line.parse(row.line).priority if row.line is not None else row.priority,
            row.fence,
            row.traceparent,
        )
        for row in sorted(taken, key=lambda row: place[row.id])
    ]


def sent(connection: Connection, ids: Sequence[int]) -> None:
    rows = OutboxRow.id.in_(ids)
    connection.execute(update(OutboxRow).where(rows, OutboxRow.topic == Topic.PUBLISH).values(sent_at=db_now()))
    connection.execute(delete(OutboxRow).where(rows, OutboxRow.topic != Topic.PUBLISH))


_SIGHT: Any = (
    select(
        JobRow.id,
        JobRow.status,
        JobRow.attempt,
        JobRow.max_attempts,
        JobRow.cancel_requested,
        JobRow.lease_until,
        JobRow.deadline,
        db_now().label("now"),
    )
    .limit(bindparam("most"))
    .with_for_update(skip_locked=True)
)
_LAPSED = _SIGHT.where(is_in(RUNNING), JobRow.lease_until <= db_now()).order_by(JobRow.lease_until)
_LATE = _SIGHT.where(is_in(QUEUED), JobRow.deadline <= db_now()).order_by(JobRow.deadline)


def reap(connection: Connection, limit: int) -> int:
    lapsed = connection.execute(_LAPSED, {"most": limit}).all()
    found: dict[Verdict, list[Any]] = defaultdict(list)
    for row in lapsed:
        found[verdict_on(row)].append(row)
    lose(connection, [row.id for row in lapsed])
    for verdict, (status, reason) in ENDS.items():
        end(connection, [row.id for row in found[verdict]], status, reason)
    if found[Verdict.DEAD]:
        clear_companions(connection, [row.id for row in found[Verdict.DEAD]])
    _requeue(connection, found[Verdict.RUN])
    late = connection.execute(_LATE, {"most": limit}).all()
    end(connection, [row.id for row in late], EXPIRED, Reason.DEADLINE_EXCEEDED)
    return len(lapsed) + len(late)


_STALE = select(func.count()).where(is_in(RUNNING), JobRow.lease_until <= db_now(seconds("since_s")))


def stale_leases(connection: Connection, for_s: float) -> int:
    return connection.execute(_STALE, {"since_s": -for_s}).scalar_one()


def _requeue(connection: Connection, rows: Sequence[Any]) -> None:
    """Back into the queue: at once after the first lost attempt, then later and later."""
    if not rows:
        return
    requeued = move((RUNNING,), QUEUED).where(JobRow.id.in_([row.id for row in rows]))
    connection.execute(requeued.values(fence=JobRow.fence + 1))
    by_delay: dict[float, list[str]] = defaultdict(list)
    for row in rows:
        by_delay[backoff_s(row.attempt)].append(row.id)
    for delay_s, ids in by_delay.items():
        dispatch(connection, Topic.PUBLISH, ids, delay_s)


def backoff_s(lost_attempts: int) -> float:
    """Seconds until a job whose worker was lost is published again, jittered."""
    if lost_attempts <= 1:
        return 0.0
    return min(_MAX_BACKOFF_S, 2.0 ** (lost_attempts - 1)) * random.uniform(0.75, 1.25)  # noqa: S311 (no secret)


_to_send = exists().where(OutboxRow.job_id == JobRow.id, OutboxRow.sent_at.is_(None))
_sent_since = select(func.max(OutboxRow.sent_at)).where(OutboxRow.job_id == JobRow.id).scalar_subquery()


def queued(connection: Connection, model: str, older_than_s: float, limit: int) -> list[Dispatch]:
    since = func.coalesce(_sent_since, JobRow.queued_at, type_=UtcTime())
    settled = (
        select(JobRow.id, JobRow.model, JobRow.priority)
        .where(is_in(QUEUED), JobRow.model == model, ~_to_send, since <= db_now(-older_than_s))
        .order_by(since, JobRow.id)
        .limit(limit)
    )
    return [Dispatch(0, Topic.PUBLISH, row.id, row.model, row.priority) for row in connection.execute(settled)]


_SENT_COUNTS = union_all(
    select(JobRow.model, literal(QUEUED.value), func.count())
    .join(OutboxRow, OutboxRow.job_id == JobRow.id)
    .where(is_in(QUEUED), OutboxRow.sent_at.is_not(None))
    .group_by(JobRow.model),
    select(JobRow.model, literal(RUNNING.value), func.count()).where(is_in(RUNNING)).group_by(JobRow.model),
)
"""One statement: between two of them jobs come and go."""


def sent_counts(connection: Connection) -> dict[str, dict[JobStatus, int]]:
    counts: dict[str, dict[JobStatus, int]] = {}
    for model, status, count in connection.execute(_SENT_COUNTS):
        counts.setdefault(model, {})[JobStatus(status)] = count
    return counts


def republish(connection: Connection, job_ids: Sequence[str]) -> int:
    lost = (
        connection.execute(
            select(JobRow.id)
            .where(JobRow.id.in_(job_ids), still_in(QUEUED), ~_to_send)
            .order_by(JobRow.id)
            .with_for_update()
        )
        .scalars()
        .all()
    )
    if lost:
        drop_publications(connection, lost)
        dispatch(connection, Topic.PUBLISH, lost)
    return len(lost)


def _term(insert: Any) -> Any:
    term = insert(RoleRow).values(role=bindparam("role"), owner=bindparam("owner"), held_until=db_now(seconds("for_s")))
    won = term.on_conflict_do_update(
        index_elements=[RoleRow.role],
        set_={"owner": term.excluded.owner, "held_until": term.excluded.held_until},
        where=or_(RoleRow.owner == term.excluded.owner, RoleRow.held_until <= db_now()),
    )
    return won.returning(RoleRow.role)


_TERMS = {"sqlite": _term(sqlite.insert), "postgresql": _term(postgresql.insert)}


def elect(connection: Connection, role: str, owner: str, ttl_s: float) -> bool:
    term = {"role": role, "owner": owner, "for_s": ttl_s}
    return connection.execute(_TERMS[connection.dialect.name], term).first() is not None
