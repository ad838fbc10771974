"""How much waits, and how fast it goes."""

from __future__ import annotations

from headrace.contract import JobStatus
from sqlalchemy import exists, func, select, union_all
from sqlalchemy.engine import Connection

from ledger.clock import db_now
from ledger.contract import Backlog, Drain
from ledger.models import JobRow
from ledger.states import QUEUED, is_in

_NEWEST = 200
"""Ends that a rate is measured by."""
_ENDS = (JobStatus.SUCCEEDED, JobStatus.FAILED)
"""Of jobs that took an engine's time."""


def submitted(connection: Connection, tenant: str, idempotency_key: str) -> bool:
    keyed = exists().where(JobRow.tenant == tenant, JobRow.idempotency_key == idempotency_key)
    return connection.execute(select(keyed)).scalar_one()


def backlog(connection: Connection, tenant: str | None = None) -> dict[tuple[str, str], Backlog]:
    grouped = (
        select(JobRow.model, JobRow.tenant, func.count(), func.sum(JobRow.tokens))
        .where(is_in(QUEUED))
        .group_by(JobRow.model, JobRow.tenant)
    )
    if tenant is not None:
        grouped = grouped.where(JobRow.tenant == tenant)
    return {
        (model, tenant): Backlog(jobs, int(tokens or 0)) for model, tenant, jobs, tokens in connection.execute(grouped)
    }


def drain(connection: Connection, model: str) -> Drain:
    """The rate falls by itself while nothing ends, as the time since then counts."""
    newest = [
        select(JobRow.finished_at, JobRow.tokens)
        .where(JobRow.model == model, JobRow.status == status)
        .order_by(JobRow.finished_at.desc())
        .limit(_NEWEST)
        .subquery()
        for status in _ENDS
    ]
    ends = connection.execute(
        union_all(*(select(each) for each in newest)).order_by(newest[0].c.finished_at.desc()).limit(_NEWEST)
    ).all()
    if not ends:
        return Drain()
    now = connection.execute(select(db_now())).scalar_one()
    took_s = max((now - ends[-1].finished_at).total_seconds(), 0.001)
    return Drain(len(ends) / took_s, sum(row.tokens or 0 for row in ends) / took_s)
