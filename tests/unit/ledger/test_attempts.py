"""What a lease allows, and what a lost one doesn't."""

from __future__ import annotations

from typing import Any

import pytest
from headrace.contract import JobResult, JobStatus, Reason, Timings, Usage

from ledger import Ledger
from ledger.contract import Claim, Outcome, Verdict

PARTIAL = JobResult(text="par", token_ids=[1], finish_reason="abort", usage=Usage(completion_tokens=1))


def taken_over(ledger: Ledger, desk: Any) -> Any:
    """A lease whose job another worker has claimed by now."""
    old = desk.running("w1")
    desk.lapse(old.job_id)
    return old, desk.claimed(old.job_id, "w2")


def test_a_committed_success_is_all_there(ledger: Ledger, desk: Any) -> None:
    lease = desk.running("w1")
    result = JobResult(
        text="It's 4.\0",
        token_ids=[5, 6],
        finish_reason="stop",
        stop_reason="4.",
        usage=Usage(prompt_tokens=9, completion_tokens=2, total_tokens=11, cached_tokens=8),
    )
    timings = Timings(queue_time_ms=1.5, time_to_first_token_ms=20, worker="w1", device="cpu", max_batch_size=3)
    assert ledger.commit([Outcome(lease, JobStatus.SUCCEEDED, result, timings=timings)]) == [True]
    job = ledger.get(lease.job_id)
    assert (job.status, job.error, job.worker, job.attempt) == (JobStatus.SUCCEEDED, None, "w1", 1)
    assert job.result == result.model_copy(update={"text": "It's 4.\ufffd"})
    assert job.created_at <= job.started_at <= job.finished_at
    total_ms = job.timings.total_time_ms
    assert 0 <= total_ms < 60_000
    assert job.timings == timings.model_copy(update={"attempts": 1, "total_time_ms": total_ms})
    assert desk.topics(lease.job_id) == []


@pytest.mark.parametrize("stop_reason", [None, "x", 2])
def test_stop_reasons_keep_their_type(ledger: Ledger, desk: Any, stop_reason: str | int | None) -> None:
    lease = desk.running()
    ledger.commit([Outcome(lease, JobStatus.SUCCEEDED, JobResult(text="", stop_reason=stop_reason))])
    result = ledger.get(lease.job_id).result
    assert result == JobResult(text="", stop_reason=stop_reason)
    assert type(result.stop_reason) is type(stop_reason)


def test_timings_can_be_queried(ledger: Ledger, desk: Any, sql: Any) -> None:
    lease = desk.running(tenant="acme")
    timings = Timings(queue_time_ms=1, time_to_first_token_ms=2, generation_time_ms=3, total_time_ms=4)
    ledger.commit([Outcome(lease, JobStatus.SUCCEEDED, PARTIAL, timings=timings)])
    [row] = sql(
        "SELECT queue_time_ms, time_to_first_token_ms, generation_time_ms, total_time_ms, completion_tokens"
        " FROM jobs WHERE tenant = 'acme' AND model = 'm'"
    )
    assert tuple(row) == (1, 2, 3, 4, 1)


@pytest.mark.parametrize(
    ("status", "reason", "message", "code", "told"),
    [
        (JobStatus.FAILED, Reason.ENGINE_ERROR, "boom", Reason.ENGINE_ERROR, "boom"),
        (JobStatus.CANCELLED, None, None, Reason.CANCELLED, "the job was cancelled"),
        (JobStatus.EXPIRED, None, None, Reason.DEADLINE_EXCEEDED, "the job's deadline passed"),
        (JobStatus.EXPIRED, Reason.TIME_LIMIT, "30 s", Reason.TIME_LIMIT, "30 s"),
    ],
)
def test_an_end_without_success_keeps_its_reason_and_its_partial_result(
    ledger: Ledger, desk: Any, status: JobStatus, reason: Reason | None, message: str | None, code: Reason, told: str
) -> None:
    """warmbly 333: an expired job's partial output is kept."""
    lease = desk.running()
    assert ledger.commit([Outcome(lease, status, PARTIAL, reason, message)]) == [True]
    job = ledger.get(lease.job_id)
    assert (job.status, job.error.code, job.error.message, job.result) == (status, code, told, PARTIAL)


def test_an_end_with_nothing_has_no_result(ledger: Ledger, desk: Any) -> None:
    lease = desk.running()
    ledger.commit([Outcome(lease, JobStatus.FAILED, reason=Reason.ENGINE_ERROR)])
    job = ledger.get(lease.job_id)
    assert job.result is None
    assert job.timings.attempts == 1
    assert job.error.message


@pytest.mark.parametrize(
    ("status", "result", "reason"),
    [
        (JobStatus.RUNNING, None, None),
        (JobStatus.QUEUED, None, None),
        (JobStatus.SUCCEEDED, None, None),
        (JobStatus.SUCCEEDED, PARTIAL, Reason.ENGINE_ERROR),
        (JobStatus.FAILED, PARTIAL, None),
    ],
)
def test_what_is_no_outcome_is_refused(
    ledger: Ledger, desk: Any, status: JobStatus, result: JobResult | None, reason: Reason | None
) -> None:
    lease = desk.running()
    with pytest.raises(ValueError, match=lease.job_id):
        ledger.commit([Outcome(lease, status, result, reason)])
    assert desk.status(lease.job_id) is JobStatus.RUNNING


def test_a_worker_that_lost_its_lease_cannot_overwrite_the_winner(ledger: Ledger, desk: Any, succeed: Any) -> None:
    old, new = taken_over(ledger, desk)
    assert ledger.commit([succeed(old, "loser")]) == [False]
    assert desk.status(old.job_id) is JobStatus.RUNNING
    assert ledger.commit([succeed(new, "winner")]) == [True]
    assert ledger.commit([succeed(old, "loser")]) == [False]
    assert ledger.get(old.job_id).result.text == "winner"


def test_an_expired_lease_that_nobody_took_still_commits(ledger: Ledger, desk: Any, succeed: Any) -> None:
    lease = desk.running()
    desk.lapse(lease.job_id)
    assert ledger.commit([succeed(lease)]) == [True]


def test_a_commit_whose_answer_got_lost_is_repeated_with_the_same_answer(
    ledger: Ledger, desk: Any, succeed: Any
) -> None:
    lease = desk.running()
    assert ledger.commit([succeed(lease, "first")]) == [True]
    before = ledger.get(lease.job_id)
    assert ledger.commit([succeed(lease, "first")]) == [True]
    assert ledger.commit([Outcome(lease, JobStatus.CANCELLED)]) == [False]
    assert ledger.get(lease.job_id) == before


def test_a_job_is_committed_once_in_a_batch(ledger: Ledger, desk: Any, succeed: Any) -> None:
    lease = desk.running()
    outcomes = [succeed(lease, "first"), Outcome(lease, JobStatus.CANCELLED), succeed(lease, "second")]
    assert ledger.commit(outcomes) == [True, False, True]
    assert ledger.get(lease.job_id).result.text == "first"


def test_a_batch_with_a_lost_lease_commits_the_others(ledger: Ledger, desk: Any, succeed: Any) -> None:
    old, new = taken_over(ledger, desk)
    mine = desk.running()
    assert ledger.commit([succeed(old), succeed(mine)]) == [False, True]
    assert desk.status(new.job_id) is JobStatus.RUNNING
    assert ledger.commit([]) == []


def test_a_late_commit_does_not_touch_a_job_that_was_handed_back(ledger: Ledger, desk: Any, succeed: Any) -> None:
    """runpod-python 250: state moves forward only."""
    released, retried = desk.running(), desk.running()
    ledger.release([released])
    ledger.commit([Outcome(retried, JobStatus.CANCELLED)])
    ledger.retry(retried.job_id)
    assert ledger.commit([succeed(released), succeed(retried)]) == [False, False]
    assert desk.status(released.job_id) is JobStatus.QUEUED
    assert desk.status(retried.job_id) is JobStatus.QUEUED


def test_renewal_extends_every_lease_and_reports_what_is_lost(ledger: Ledger, desk: Any) -> None:
    old, new = taken_over(ledger, desk)
    mine, marked = desk.running("w1", lease_s=1), desk.running("w1")
    ledger.request_cancel([marked.job_id])
    renewal = ledger.renew([old, mine, marked], 300)
    assert (renewal.lost, renewal.cancelled) == ({old.job_id}, {marked.job_id})
    assert desk.verdict(mine.job_id) is Verdict.DUPLICATE
    assert ledger.renew([new], 30).lost == set()
    nothing = ledger.renew([], 30)
    assert (nothing.lost, nothing.cancelled) == (set(), set())


def test_renewal_revives_a_lapsed_lease_that_nobody_took(ledger: Ledger, desk: Any) -> None:
    lease = desk.running()
    desk.lapse(lease.job_id)
    assert ledger.renew([lease], 30).lost == set()
    assert desk.verdict(lease.job_id) is Verdict.DUPLICATE


def test_renewal_of_an_ended_job_is_lost(ledger: Ledger, desk: Any, succeed: Any) -> None:
    lease = desk.running()
    ledger.commit([succeed(lease)])
    assert ledger.renew([lease], 30).lost == {lease.job_id}


def test_release_hands_a_job_back_with_its_attempt(ledger: Ledger, desk: Any) -> None:
    """celery 4354: a warm shutdown neither loses a job nor uses one of its attempts up."""
    lease = desk.running(max_attempts=1)
    assert ledger.release([lease]) == [True]
    job = ledger.get(lease.job_id)
    assert (job.status, job.attempt, job.worker, job.started_at) == (JobStatus.QUEUED, 0, None, None)
    assert desk.topics(lease.job_id) == ["publish"]
    assert ledger.release([lease]) == [True]
    assert ledger.get(lease.job_id).attempt == 0
    again = desk.claimed(lease.job_id)
    assert (again.attempt, again.fence) == (1, lease.fence + 1)
    assert ledger.release([lease]) == [False]
    assert desk.status(lease.job_id) is JobStatus.RUNNING


def test_release_of_what_is_not_held(ledger: Ledger, desk: Any, succeed: Any) -> None:
    old, new = taken_over(ledger, desk)
    done = desk.running()
    ledger.commit([succeed(done)])
    assert ledger.release([old, done]) == [False, False]
    assert desk.status(done.job_id) is JobStatus.SUCCEEDED
    assert ledger.renew([new], 30).lost == set()
    assert ledger.release([]) == []


def test_release_of_a_job_that_is_to_be_cancelled_ends_it(ledger: Ledger, desk: Any) -> None:
    lease = desk.running()
    ledger.request_cancel([lease.job_id])
    assert ledger.release([lease]) == [True]
    assert desk.status(lease.job_id) is JobStatus.CANCELLED
    assert "publish" not in desk.topics(lease.job_id)


def test_a_malformed_message_becomes_a_failed_job(ledger: Ledger, desk: Any, sql: Any) -> None:
    """llm-d-async 353: the reason is where the producer looks, not only in a worker's log."""
    ledger.reject("raw-1", "m", Reason.INVALID_REQUEST, "prompt: missing", '{"model": "m\0"}' + 10**6 * "x")
    job = ledger.get("raw-1")
    assert (job.status, job.error.code, job.error.message) == (
        JobStatus.FAILED,
        Reason.INVALID_REQUEST,
        "prompt: missing",
    )
    [row] = sql("SELECT raw FROM jobs")
    assert row.raw.startswith('{"model"')
    assert len(row.raw) < 100_000
    assert ledger.claim([Claim("raw-1")], "w", 30)[0].verdict is Verdict.TERMINAL


def test_rejecting_a_known_id_changes_nothing(ledger: Ledger, desk: Any) -> None:
    job_id = desk.queued()
    before = ledger.get(job_id)
    ledger.reject(job_id, "m", Reason.INVALID_REQUEST, "no", "{}")
    assert ledger.get(job_id) == before


def test_timings_that_are_no_numbers_are_left_out(ledger: Ledger, desk: Any) -> None:
    """JSON has no NaN, and one bad number must not keep a batch from being committed."""
    lease = desk.running()
    timings = Timings(tokens_per_second=float("inf"), mean_itl_ms=float("nan"), prefill_time_ms=2)
    assert ledger.commit([Outcome(lease, JobStatus.SUCCEEDED, PARTIAL, timings=timings)]) == [True]
    kept = ledger.get(lease.job_id).timings
    assert (kept.tokens_per_second, kept.mean_itl_ms, kept.prefill_time_ms) == (None, None, 2)
