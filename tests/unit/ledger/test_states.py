"""The transition table, walked."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sqlalchemy as sa
from headrace.contract import JobStatus

from ledger.clock import db_now
from ledger.contract import IllegalTransition
from ledger.database import make_engine
from ledger.models import JobRow
from ledger.states import TRANSITIONS, move

ALL_PAIRS = list(itertools.product(JobStatus, JobStatus))


def test_every_state_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(JobStatus)


def test_an_end_is_left_only_by_a_retry_and_a_success_never() -> None:
    for status in JobStatus:
        if status.terminal:
            assert TRANSITIONS[status] == (set() if status is JobStatus.SUCCEEDED else {JobStatus.QUEUED})


def test_every_state_can_be_reached_and_every_live_one_can_end() -> None:
    reached, frontier = {JobStatus.QUEUED}, [JobStatus.QUEUED]
    while frontier:
        new = TRANSITIONS[frontier.pop()] - reached
        reached |= new
        frontier += new
    assert reached == set(JobStatus)
    for status in (JobStatus.QUEUED, JobStatus.RUNNING):
        assert {JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.EXPIRED} <= TRANSITIONS[status]


@pytest.mark.parametrize(("source", "target"), ALL_PAIRS)
def test_a_move_outside_the_table_cannot_be_written(source: JobStatus, target: JobStatus) -> None:
    if target in TRANSITIONS[source]:
        move((source,), target)
    else:
        with pytest.raises(IllegalTransition, match=f"from {source} to {target}"):
            move((source,), target)


def put(connection: sa.Connection, status: JobStatus) -> None:
    """The one job of this test, in any state."""
    connection.execute(sa.delete(JobRow))
    job = sa.insert(JobRow).values(
        {
            "id": "j",
            "tenant": "t",
            "model": "m",
            "status": status,
            "priority": "normal",
            "attempt": 1,
            "max_attempts": 3,
            "created_at": db_now(),
            "accepted_at": db_now(),
            "queued_at": db_now(),
            "metadata": {},
            "lease_until": db_now(9) if status is JobStatus.RUNNING else None,
            "finished_at": db_now() if status.terminal else None,
        }
    )
    connection.execute(job)


def test_each_move_changes_jobs_in_its_source_states_alone(migrated_url: str) -> None:
    """Every allowed move, tried on a job in every state: the WHERE clause decides, and the database's checks hold."""
    engine = make_engine(migrated_url)
    tried = 0
    with engine.connect() as connection:
        for source, target in ALL_PAIRS:
            if target not in TRANSITIONS[source]:
                continue
            for status in JobStatus:
                with connection.begin():
                    put(connection, status)
                    change = move((source,), target)
                    if target is JobStatus.RUNNING:
                        change = change.values(lease_until=db_now(9))
                    changed = connection.execute(change).rowcount
                    now: Any = connection.execute(sa.select(JobRow.status)).scalar_one()
                assert changed == (status is source)
                assert now is (target if status is source else status)
                tried += 1
    engine.dispose()
    assert tried == sum(map(len, TRANSITIONS.values())) * len(JobStatus)
