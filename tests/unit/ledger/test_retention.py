"""What has ended is forgotten by its age, in batches; what waits or runs never is (celery 3813, BentoML 5189)."""

from __future__ import annotations

from typing import Any

from headrace.contract import JobStatus

from ledger import Ledger
from ledger.contract import Pruned, Retention
from ledger.retention import kept
from settings import RetentionSettings

DAY_S = 86_400.0


def age(sql: Any, *job_ids: str) -> None:
    """Let these jobs have ended, or begun, long ago."""
    for job_id in job_ids:
        then = "2020-01-01 00:00:00.000000"
        sql("UPDATE jobs SET created_at = :then, queued_at = :then WHERE id = :id", id=job_id, then=then)
        sql("UPDATE jobs SET finished_at = :then WHERE id = :id AND finished_at IS NOT NULL", id=job_id, then=then)


def dead_letter(ledger: Ledger, desk: Any) -> str:
    lease = desk.running(max_attempts=1)
    desk.lapse(lease.job_id)
    ledger.reap()
    return str(lease.job_id)


def test_jobs_go_with_all_that_belongs_to_them_once_they_are_old(ledger: Ledger, desk: Any, sql: Any) -> None:
    old = [desk.succeeded(), desk.failed(), desk.succeeded(model="n")]
    cancelled = desk.queued()
    ledger.request_cancel([cancelled])
    young = desk.succeeded(idempotency_key="young")
    age(sql, *old, cancelled)
    retention = Retention(jobs_s=DAY_S)
    assert ledger.expired(retention) == Pruned(jobs=4)
    assert ledger.prune(retention) == Pruned(jobs=4)
    assert [row.id for row in sql("SELECT id FROM jobs")] == [young]
    assert [row.job_id for row in sql("SELECT job_id FROM results")] == [young]
    assert ledger.prune(retention) == Pruned()


def test_what_has_not_ended_is_never_removed(ledger: Ledger, desk: Any, sql: Any) -> None:
    waiting, running, retried = desk.queued(), desk.running().job_id, desk.failed()
    age(sql, waiting, running, retried)
    ledger.retry(retried)
    assert ledger.prune(Retention(jobs_s=1e-6, dead_letters_s=1e-6)) == Pruned()
    assert {desk.status(i) for i in (waiting, running, retried)} == {JobStatus.QUEUED, JobStatus.RUNNING}


def test_dead_letters_have_an_age_of_their_own(ledger: Ledger, desk: Any, sql: Any) -> None:
    letter, failed = dead_letter(ledger, desk), desk.failed()
    age(sql, letter, failed)
    assert ledger.prune(Retention(jobs_s=DAY_S)) == Pruned(jobs=1)
    assert desk.status(letter) is JobStatus.FAILED
    assert ledger.prune(Retention(dead_letters_s=DAY_S)) == Pruned(dead_letters=1)
    assert ledger.get(letter) is None


def test_a_batch_is_bounded_and_begins_with_the_oldest(ledger: Ledger, desk: Any, sql: Any) -> None:
    ids = [desk.succeeded() for _ in range(5)]
    age(sql, *ids[1:])
    sql("UPDATE jobs SET finished_at = '2019-01-01 00:00:00.000000' WHERE id = :id", id=ids[4])
    assert ledger.prune(Retention(jobs_s=DAY_S), limit=1) == Pruned(jobs=1)
    assert ledger.get(ids[4]) is None
    assert [ledger.prune(Retention(jobs_s=DAY_S), limit=2).jobs for _ in range(3)] == [2, 1, 0]


def test_forgotten_revocations_and_keys_go_too(ledger: Ledger, sql: Any) -> None:
    ledger.revoke(["never", "young"])
    sql("UPDATE revocations SET asked_at = '2020-01-01 00:00:00.000000' WHERE job_id = 'never'")
    assert ledger.prune(Retention()) == Pruned(revocations=1)
    assert [row.job_id for row in sql("SELECT job_id FROM revocations")] == ["young"]


def test_settings_are_in_days_and_may_keep_for_good() -> None:
    assert kept(RetentionSettings(jobs_days=1.5, dead_letters_days=None, keys_days=2)) == Retention(
        1.5 * DAY_S, None, 2 * DAY_S
    )
