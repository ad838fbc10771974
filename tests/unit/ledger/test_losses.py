"""Attempts that are lost with their workers: who has to run alone, and who gets an attempt back."""

from __future__ import annotations

import pytest
from headrace.contract import JobStatus, Reason

from ledger import Ledger
from ledger.contract import Claim, JobFilter, Verdict
from tests.unit.ledger.conftest import Desk, Sql


@pytest.fixture
def desk(ledger: Ledger, sql: Sql) -> Desk:
    return Desk(ledger, sql)


def die(desk: Desk, *job_ids: str, owner: str, alone: bool = False) -> None:
    """A worker claims the jobs and dies; the reaper finds them."""
    results = desk.ledger.claim([Claim(job_id, alone=alone) for job_id in job_ids], owner, 30)
    assert [result.verdict for result in results] == [Verdict.RUN] * len(job_ids)
    desk.sql(
        "UPDATE jobs SET lease_until = '2020-01-01 00:00:00.000000' WHERE worker = :owner AND status = 'running'",
        owner=owner,
    )
    desk.ledger.reap()


def test_the_last_attempt_runs_alone(desk: Desk) -> None:
    job = desk.queued(max_attempts=3)
    die(desk, job, owner="w1")
    die(desk, job, owner="w2")
    assert desk.verdict(job) is Verdict.ALONE
    found = desk.ledger.get(job)
    assert found is not None
    assert (found.status, found.attempt) == (JobStatus.QUEUED, 2), "nothing has changed"
    [once, again] = desk.ledger.claim([Claim(job), Claim(job)], "w3", 30)
    assert (once.verdict, again.verdict) == (Verdict.ALONE, Verdict.DUPLICATE)
    [alone] = desk.ledger.claim([Claim(job, alone=True)], "w3", 30)
    assert alone.verdict is Verdict.RUN


@pytest.mark.parametrize("max_attempts", [1, 5])
def test_a_first_attempt_needs_nobody_to_leave(desk: Desk, max_attempts: int) -> None:
    assert desk.verdict(desk.queued(max_attempts=max_attempts)) is Verdict.RUN


def test_an_attempt_that_was_handed_back_makes_nobody_suspicious(desk: Desk) -> None:
    lease = desk.running(max_attempts=2)
    assert desk.ledger.release([lease]) == [True]
    assert desk.verdict(lease.job_id) is Verdict.RUN
    assert desk.ledger.losses(lease.job_id) == []


def test_an_expired_lease_is_not_taken_over_beside_others_for_the_last_time(desk: Desk) -> None:
    lease = desk.running(max_attempts=2)
    desk.sql("UPDATE jobs SET lease_until = '2020-01-01 00:00:00.000000'")
    assert desk.verdict(lease.job_id) is Verdict.ALONE
    assert desk.ledger.reap() == 1
    assert [loss.attempt for loss in desk.ledger.losses(lease.job_id)] == [1]


def test_losses_say_where_and_with_whom(desk: Desk) -> None:
    poison, other = desk.queued(), desk.queued()
    die(desk, poison, other, owner="w1")
    lease = desk.claimed(poison, "w2")
    desk.sql("UPDATE jobs SET lease_until = '2020-01-01 00:00:00.000000' WHERE id = :id", id=lease.job_id)
    [taken] = desk.ledger.claim([Claim(poison, alone=True)], "w3", 30)
    assert taken.verdict is Verdict.RUN
    told = [(loss.attempt, loss.worker, loss.companions) for loss in desk.ledger.losses(poison)]
    assert told == [(1, "w1", 1), (2, "w2", 0)]
    assert all(loss.started_at is not None and loss.started_at <= loss.lost_at for loss in desk.ledger.losses(poison))


def test_who_died_with_the_culprit_gets_its_attempts_back(desk: Desk) -> None:
    """https://github.com/celery/celery/issues/9082: a poison job is found, and its companions don't pay for it."""
    poison, companion, stranger = desk.queued(), desk.queued(), desk.queued()
    die(desk, poison, companion, owner="w1")
    die(desk, poison, companion, owner="w2")
    die(desk, stranger, owner="w3")
    assert desk.verdict(companion) is Verdict.ALONE
    die(desk, poison, owner="w4", alone=True)
    jobs = [desk.ledger.get(job) for job in (poison, companion, stranger)]
    assert [job.attempt for job in jobs if job is not None] == [3, 0, 1]
    assert jobs[0] is not None
    assert jobs[0].error is not None
    assert (jobs[0].status, jobs[0].error.code) == (JobStatus.FAILED, Reason.DEAD_LETTER)
    assert desk.verdict(companion) is Verdict.RUN


def test_nobody_is_cleared_by_a_job_that_did_not_die_alone(desk: Desk) -> None:
    """Its worker lost others with it: it may be as innocent as they are."""
    first, second = desk.queued(max_attempts=1), desk.queued(max_attempts=3)
    die(desk, first, second, owner="w1")
    found = desk.ledger.get(second)
    assert found is not None
    assert found.attempt == 1


def test_a_replayed_dead_letter_keeps_its_history(desk: Desk) -> None:
    poison = desk.queued(max_attempts=1)
    die(desk, poison, owner="w1")
    assert desk.ledger.retry(poison).attempt == 0
    assert [loss.worker for loss in desk.ledger.losses(poison)] == ["w1"]
    assert desk.verdict(poison) is Verdict.RUN


def test_dead_letters_are_listed_and_purged(desk: Desk) -> None:
    dead, failed = desk.queued(max_attempts=1, tenant="a"), desk.failed()
    die(desk, dead, owner="w1")
    where = JobFilter(reason=Reason.DEAD_LETTER)
    assert [job.id for job in desk.ledger.page(where).data] == [dead]
    assert desk.ledger.page(JobFilter(reason=Reason.DEAD_LETTER, ended_before_s=60)).data == []
    assert [job.id for job in desk.ledger.page(JobFilter(reason=Reason.DEAD_LETTER, ended_before_s=-60)).data] == [dead]
    assert not desk.ledger.purge(dead, tenant="b")
    assert not desk.ledger.purge(failed)
    assert not desk.ledger.purge("nobody")
    assert desk.ledger.purge(dead, tenant="a")
    assert desk.ledger.get(dead) is None
    assert desk.ledger.losses(dead) == []
    assert desk.sql("SELECT COUNT(*) FROM losses")[0][0] == 0
