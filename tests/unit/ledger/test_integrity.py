"""`check()` finds each kind of damage, and the database itself refuses the worst."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from ledger import Ledger
from ledger.integrity import BROKEN

DAMAGE = {
    "a success without a result": "DELETE FROM results WHERE job_id = :succeeded",
    "a success with an error": "UPDATE jobs SET error_code = 'cancelled' WHERE id = :succeeded",
    "an end without success and without a reason": "UPDATE jobs SET error_code = NULL WHERE id = :failed",
    "a live job with a result": "INSERT INTO results (job_id, text) VALUES (:queued, 'x')",
    "a live job with an error": "UPDATE jobs SET error_code = 'cancelled' WHERE id = :running",
    "work without a worker, or without an attempt": "UPDATE jobs SET worker = NULL WHERE id = :running",
    "a queued job that used up its attempts": "UPDATE jobs SET attempt = 3 WHERE id = :queued",
    "a queued job that is to be cancelled": "UPDATE jobs SET cancel_requested = true WHERE id = :queued",
    "a queued job without a place in the queue": "DELETE FROM outbox WHERE job_id = :queued",
    "a place in the queue without a queued job": (
        "INSERT INTO outbox (job_id, topic, due_at) VALUES (:failed, 'publish', '2026-01-01 00:00:00.000000')"
    ),
}
REFUSED = {
    "a lease without work, or work without a lease": [
        "UPDATE jobs SET lease_until = created_at WHERE id = :queued",
        "UPDATE jobs SET lease_until = NULL WHERE id = :running",
    ],
    "an end without its time, or a time without an end": [
        "UPDATE jobs SET finished_at = NULL WHERE id = :succeeded",
        "UPDATE jobs SET finished_at = created_at WHERE id = :queued",
    ],
    "attempts out of bounds": [
        "UPDATE jobs SET attempt = 4 WHERE id = :queued",
        "UPDATE jobs SET attempt = -1 WHERE id = :queued",
    ],
}


@pytest.fixture
def ids(desk: Any) -> dict[str, str]:
    """A job in each state that the damage is done to."""
    return {
        "succeeded": desk.succeeded(),
        "failed": desk.failed(),
        "queued": desk.queued(),
        "running": desk.running().job_id,
    }


def test_every_invariant_is_tried_here() -> None:
    assert set(BROKEN) == set(DAMAGE) | set(REFUSED)


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_and_named(ledger: Ledger, ids: dict[str, str], sql: Any, what: str) -> None:
    ledger.check()
    statement = DAMAGE[what]
    used = {name: job_id for name, job_id in ids.items() if f":{name}" in statement}
    sql(statement, **used)
    with pytest.raises(AssertionError, match=what) as found:
        ledger.check()
    [job_id] = used.values()
    assert job_id in str(found.value)
    sql("DELETE FROM jobs")


@pytest.mark.parametrize("what", REFUSED)
def test_the_database_refuses(ledger: Ledger, ids: dict[str, str], sql: Any, what: str) -> None:
    for statement in REFUSED[what]:
        used = {name: job_id for name, job_id in ids.items() if f":{name}" in statement}
        with pytest.raises(IntegrityError):
            sql(statement, **used)


def test_deleting_a_job_takes_what_belongs_to_it(desk: Any, ids: dict[str, str], sql: Any) -> None:
    sql("DELETE FROM jobs")
    assert not sql("SELECT * FROM results")
    assert not sql("SELECT * FROM outbox")
