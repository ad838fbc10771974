"""What is forgotten, and when. Only what has ended is: a job that waits or runs is never touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.contract import JobStatus, Reason
from sqlalchemy import ColumnElement, Select, delete, func, or_, select
from sqlalchemy.engine import Connection

from ledger.clock import db_now
from ledger.contract import Pruned, Retention
from ledger.models import ApiKeyRow, JobRow, RevocationRow
from ledger.states import FAILED, still_in
from settings import RetentionSettings

_DAY_S = 86_400.0
REMEMBERED_S = _DAY_S
"""How long a revoke waits for its job."""
_ENDS = tuple(status for status in JobStatus if status.terminal)
_dead_letter = JobRow.error_code == Reason.DEAD_LETTER


def kept(asked: RetentionSettings) -> Retention:
    """The settings in seconds."""
    days = (asked.jobs_days, asked.dead_letters_days, asked.keys_days)
    return Retention(*(None if each is None else each * _DAY_S for each in days))


def prune(connection: Connection, retention: Retention, limit: int) -> Pruned:
    """Remove at most `limit` of each kind, with all that belongs to it."""
    jobs = _delete_jobs(connection, retention.jobs_s, limit, dead=False)
    letters = _delete_jobs(connection, retention.dead_letters_s, limit, dead=True)
    old = select(RevocationRow.job_id).where(RevocationRow.asked_at < db_now(-REMEMBERED_S)).limit(limit)
    revocations = connection.execute(delete(RevocationRow).where(RevocationRow.job_id.in_(old))).rowcount
    keys = 0
    if (ended := _ended_keys(retention)) is not None:
        keys = connection.execute(delete(ApiKeyRow).where(ended)).rowcount
    return Pruned(jobs, letters, keys, revocations)


def expired(connection: Connection, retention: Retention) -> Pruned:
    """How much there is to remove."""
    models = list(_models(connection))

    def count(age_s: float | None, dead: bool) -> int:
        found = [old.with_only_columns(func.count()) for old in _old_jobs(models, age_s, dead)]
        return sum(connection.execute(each).scalar_one() for each in found)

    forgotten = select(func.count()).where(RevocationRow.asked_at < db_now(-REMEMBERED_S))
    ended = _ended_keys(retention)
    return Pruned(
        jobs=count(retention.jobs_s, dead=False),
        dead_letters=count(retention.dead_letters_s, dead=True),
        keys=0 if ended is None else connection.execute(select(func.count()).where(ended)).scalar_one(),
        revocations=connection.execute(forgotten).scalar_one(),
    )


def _delete_jobs(connection: Connection, age_s: float | None, limit: int, dead: bool) -> int:
    ids: list[str] = []
    for old in _old_jobs(_models(connection), age_s, dead):
        ids += connection.execute(old.order_by(JobRow.finished_at).limit(limit - len(ids))).scalars()
        if len(ids) >= limit:
            break
    if not ids:
        return 0
    # One that is being retried at this moment has not ended any more.
    still = delete(JobRow).where(JobRow.id.in_(ids), still_in(*_ENDS))
    return connection.execute(still).rowcount


def _old_jobs(models: Iterator[str] | list[str], age_s: float | None, dead: bool) -> Iterator[Select[Any]]:
    """One query for each model and end: each reads a stretch of one index."""
    if age_s is None:
        return
    for model in models:
        for status in (FAILED,) if dead else _ENDS:
            old = select(JobRow.id).where(
                JobRow.model == model, JobRow.status == status, JobRow.finished_at < db_now(-age_s)
            )
            if status is FAILED:
                old = old.where(_dead_letter if dead else or_(~_dead_letter, JobRow.error_code.is_(None)))
            yield old


def _ended_keys(retention: Retention) -> ColumnElement[bool] | None:
    if retention.keys_s is None:
        return None
    before = db_now(-retention.keys_s)
    return or_(ApiKeyRow.revoked_at < before, ApiKeyRow.expires_at < before)


def _models(connection: Connection) -> Iterator[str]:
    """The models that there are jobs of, each found by one step in the index."""
    model = connection.execute(select(func.min(JobRow.model))).scalar_one()
    while model is not None:
        yield model
        model = connection.execute(select(func.min(JobRow.model)).where(JobRow.model > model)).scalar_one()
