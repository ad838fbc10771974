"""Attempts that were lost with their workers: what is remembered of them, and who is cleared of suspicion.

When a worker dies, every job that it held loses an attempt, though one of them at most is to blame.
The last attempt of a job runs alone (`Verdict.ALONE`). If that one is lost too, the job is what kills
workers: it is dead-lettered, and the jobs that died with it earlier get their attempts back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import case, func, insert, literal, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.orm import aliased

from ledger.clock import db_now
from ledger.contract import Loss
from ledger.models import JobRow, LossRow
from ledger.states import QUEUED, still_in


def lose(connection: Connection, ids: Sequence[str]) -> None:
    """Remember that these jobs' leases ran out. To be called before the jobs change."""
    if ids:
        columns = ["job_id", "attempt", "worker", "started_at", "lost_at"]
        lost = select(
            JobRow.id, JobRow.attempt, func.coalesce(JobRow.worker, literal("")), JobRow.started_at, db_now()
        ).where(JobRow.id.in_(ids))
        connection.execute(insert(LossRow).from_select(columns, lost))


def must_be_alone(row: Any) -> bool:
    """Whether a job that may run has lost all its attempts but the last."""
    return bool(row.attempt and row.attempt + 1 >= row.max_attempts)


def clear_companions(connection: Connection, dead: Iterable[str]) -> None:
    """Give queued jobs the attempts back that they lost together with jobs which have just been found to kill workers.

    A job is found if its last attempt was lost with nobody else.
    """
    last = select(func.max(LossRow.id)).where(LossRow.job_id.in_(list(dead))).group_by(LossRow.job_id)
    same = aliased(LossRow)
    others = select(func.count()).where(same.worker == LossRow.worker).scalar_subquery()
    culprits = connection.execute(select(LossRow.job_id).where(LossRow.id.in_(last), others == 1)).scalars().all()
    if not culprits:
        return
    workers = select(LossRow.worker).where(LossRow.job_id.in_(culprits))
    together = (
        select(func.count())
        .where(LossRow.job_id == JobRow.id, LossRow.worker.in_(workers), LossRow.lost_at >= JobRow.accepted_at)
        .correlate(JobRow)
        .scalar_subquery()
    )
    companions = select(LossRow.job_id).where(LossRow.worker.in_(workers))
    connection.execute(
        update(JobRow)
        .where(still_in(QUEUED), JobRow.id.in_(companions), JobRow.id.not_in(culprits))
        .values(attempt=case((JobRow.attempt > together, JobRow.attempt - together), else_=0))
    )


def losses(connection: Connection, job_id: str) -> list[Loss]:
    same = aliased(LossRow)
    companions = select(func.count() - 1).where(same.worker == LossRow.worker).scalar_subquery()
    found = select(LossRow.attempt, LossRow.worker, LossRow.lost_at, companions, LossRow.started_at)
    rows = connection.execute(found.where(LossRow.job_id == job_id).order_by(LossRow.id))
    return [Loss(*row) for row in rows]
