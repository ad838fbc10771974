"""Claims: each delivery gets one verdict, and what the verdict says has been written."""

from __future__ import annotations

import time
from typing import Any

import pytest
import sqlalchemy as sa
from headrace.contract import JobRequest, JobStatus, Reason, new_job_id

from ledger import Ledger, deliveries
from ledger.contract import Claim, Lease, Outcome, Retention, Verdict
from ledger.database import Database

RAW = JobRequest(model="m", prompt="raw")


def test_a_claim_counts_the_attempt_before_work_starts(ledger: Ledger, desk: Any) -> None:
    """celery 9082: a poison job is counted even if its worker dies at once."""
    job_id = desk.queued(ttl_s=100)
    [result] = ledger.claim([Claim(job_id)], "w1", 30)
    assert (result.verdict, result.lease) == (Verdict.RUN, Lease(job_id, "w1", fence=1, attempt=1))
    assert result.request.prompt == "hello"
    assert 0 <= result.queued_s < 10
    assert 90 < result.remaining_s <= 100
    job = ledger.get(job_id)
    assert (job.status, job.attempt, job.worker) == (JobStatus.RUNNING, 1, "w1")
    assert job.started_at >= job.created_at


@pytest.mark.parametrize("owner", ["w1", "w2"])
def test_a_live_lease_makes_a_second_delivery_a_duplicate(ledger: Ledger, desk: Any, owner: str) -> None:
    """celery 5935: redelivered while it runs, by another worker's doing or by this one's (kombu 337)."""
    lease = desk.running("w1")
    [result] = ledger.claim([Claim(lease.job_id)], owner, 30)
    assert (result.verdict, result.lease, result.request) == (Verdict.DUPLICATE, None, None)
    assert ledger.commit([Outcome(lease, JobStatus.CANCELLED)]) == [True]


@pytest.mark.parametrize("owner", ["w1", "w2"])
def test_an_expired_lease_can_be_claimed(ledger: Ledger, desk: Any, owner: str) -> None:
    old = desk.running("w1")
    desk.lapse(old.job_id)
    new = desk.claimed(old.job_id, owner)
    assert (new.fence, new.attempt) == (old.fence + 1, 2)
    assert ledger.renew([old], 30).lost == {old.job_id}
    assert ledger.get(old.job_id).worker == owner


def test_a_lease_expires_on_the_databases_clock(ledger: Ledger, desk: Any) -> None:
    lease = desk.running("w1", lease_s=-1)
    assert desk.claimed(lease.job_id, "w2").attempt == 2


def test_a_finished_job_is_terminal(ledger: Ledger, desk: Any) -> None:
    for job_id in (desk.succeeded(), desk.failed()):
        before = ledger.get(job_id)
        assert desk.verdict(job_id) is Verdict.TERMINAL
        assert ledger.get(job_id) == before


def test_what_was_to_be_cancelled_ends_at_the_claim(ledger: Ledger, desk: Any) -> None:
    """celery 7912, lost revokes: cancellation stands in the ledger, and no worker restart forgets it."""
    lease = desk.running()
    ledger.request_cancel([lease.job_id])
    desk.lapse(lease.job_id)
    assert desk.verdict(lease.job_id) is Verdict.CANCELLED
    job = ledger.get(lease.job_id)
    assert (job.status, job.error.code) == (JobStatus.CANCELLED, Reason.CANCELLED)
    assert ledger.renew([lease], 30).lost == {lease.job_id}


def test_what_is_past_its_deadline_ends_at_the_claim(ledger: Ledger, desk: Any) -> None:
    job_id = desk.queued(ttl_s=100)
    desk.overdue(job_id)
    assert desk.verdict(job_id) is Verdict.EXPIRED
    job = ledger.get(job_id)
    assert (job.status, job.error.code, job.attempt) == (JobStatus.EXPIRED, Reason.DEADLINE_EXCEEDED, 0)
    assert desk.topics(job_id) == []


def test_used_up_attempts_end_at_the_claim(ledger: Ledger, desk: Any) -> None:
    """celery 9082, worker-vllm 29: past the limit a job that kills its workers is dead-lettered."""
    job_id = desk.queued(max_attempts=2)
    for attempt in (1, 2):
        assert desk.claimed(job_id).attempt == attempt
        desk.lapse(job_id)
    assert desk.verdict(job_id) is Verdict.DEAD
    job = ledger.get(job_id)
    assert (job.status, job.error.code, job.attempt) == (JobStatus.FAILED, Reason.DEAD_LETTER, 2)
    assert ledger.retry(job_id).attempt == 0


def test_an_unknown_id_without_a_request_is_unknown(desk: Any) -> None:
    assert desk.verdict("none") is Verdict.UNKNOWN


def test_a_batch_is_decided_in_order_and_each_for_itself(ledger: Ledger, desk: Any) -> None:
    fresh, late, done, live = desk.queued(), desk.queued(ttl_s=9), desk.succeeded(), desk.running().job_id
    desk.overdue(late)
    ids = [fresh, "none", late, done, live, fresh, late]
    results = ledger.claim([Claim(i) for i in ids], "w", 30)
    assert [r.job_id for r in results] == ids
    assert [r.verdict for r in results] == [
        Verdict.RUN,
        Verdict.UNKNOWN,
        Verdict.EXPIRED,
        Verdict.TERMINAL,
        Verdict.DUPLICATE,
        Verdict.DUPLICATE,
        Verdict.TERMINAL,
    ]
    assert ledger.claim([], "w", 30) == []


def test_a_raw_message_gets_its_row_at_the_claim(ledger: Ledger, desk: Any) -> None:
    [result] = ledger.claim([Claim("raw-1", RAW)], "w1", 30)
    assert result.verdict is Verdict.RUN
    assert result.request.seed is not None
    assert result.request.model_copy(update={"seed": None}) == RAW
    assert desk.topics("raw-1") == []
    assert ledger.get("raw-1").attempt == 1
    assert ledger.claim([Claim("raw-1", RAW)], "w2", 30)[0].verdict is Verdict.DUPLICATE


def test_a_raw_message_that_was_revoked_before_it_came_ends_as_cancelled(ledger: Ledger, sql: Any) -> None:
    ledger.revoke(["raw-1", "raw-2"])
    ledger.revoke(["raw-1"])
    claims = [Claim("raw-1", RAW), Claim("raw-3", RAW)]
    assert [one.verdict for one in ledger.claim(claims, "w1", 30)] == [Verdict.CANCELLED, Verdict.RUN]
    job = ledger.get("raw-1")
    assert (job.status, job.attempt, job.error.code) == (JobStatus.CANCELLED, 0, Reason.CANCELLED)
    assert ledger.retry("raw-1").status is JobStatus.QUEUED
    assert ledger.claim([Claim("raw-1")], "w1", 30)[0].verdict is Verdict.RUN
    sql("UPDATE revocations SET asked_at = '2020-01-01 00:00:00.000000'")
    ledger.revoke(["raw-3"])
    ledger.prune(Retention())
    assert sql("SELECT * FROM revocations") == [], "known jobs are not remembered, and nothing for ever"


def test_a_raw_message_taken_over_keeps_the_row_of_its_first_claim(ledger: Ledger, desk: Any) -> None:
    first = ledger.claim([Claim("raw-1", RAW)], "w1", 30)[0]
    desk.lapse("raw-1")
    second = ledger.claim([Claim("raw-1", RAW)], "w2", 30)[0]
    assert (second.verdict, second.lease.attempt) == (Verdict.RUN, 2)
    assert second.request == first.request


def test_a_raw_message_past_its_deadline_expires(ledger: Ledger) -> None:
    """llm-d-async 353: an expired raw message becomes a recorded job, not a line in a worker's log."""
    late = RAW.model_copy(update={"deadline": ledger.now()})
    assert ledger.claim([Claim("raw-1", late)], "w", 30)[0].verdict is Verdict.EXPIRED
    assert ledger.get("raw-1").status is JobStatus.EXPIRED


def test_a_raw_message_is_as_old_as_its_id_says_by_the_databases_clock(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose own clock is wrong makes no message look old."""
    now_s = ledger.now().timestamp()
    monkeypatch.setattr(time, "time", lambda: now_s + 3600)
    late, early = new_job_id(now_s - 40), new_job_id(now_s - 10)
    request = RAW.model_copy(update={"ttl_s": 30})
    expired, runs = ledger.claim([Claim(late, request), Claim(early, request)], "w", 30)
    assert (expired.verdict, runs.verdict) == (Verdict.EXPIRED, Verdict.RUN)
    assert 10 <= runs.queued_s < 15
    assert 15 < runs.remaining_s <= 20


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("prompt", ["raw", "other"])
def test_a_second_raw_message_with_one_key_fails_and_names_the_first(
    ledger: Ledger, together: bool, prompt: str
) -> None:
    """Its producer waits for its own id, so that must end; the work is not done twice."""
    keyed = RAW.model_copy(update={"idempotency_key": "k"})
    claims = [Claim("raw-1", keyed), Claim("raw-2", keyed.model_copy(update={"prompt": prompt}))]
    batches = [claims] if together else [[claim] for claim in claims]
    verdicts = [result.verdict for batch in batches for result in ledger.claim(batch, "w", 30)]
    assert verdicts == [Verdict.RUN, Verdict.TERMINAL]
    refused = ledger.get("raw-2")
    assert (refused.status, refused.error.code, refused.attempt) == (JobStatus.FAILED, Reason.INVALID_REQUEST, 0)
    assert "raw-1" in refused.error.message
    assert ledger.claim([claims[1]], "w", 30)[0].verdict is Verdict.TERMINAL


def test_a_stored_request_that_is_no_longer_valid_fails_alone(ledger: Ledger, desk: Any, sql: Any) -> None:
    bad, good = desk.queued(), desk.queued()
    sql("""UPDATE jobs SET request = '{"model": "m", "nonsense": 1}' WHERE id = :id""", id=bad)
    results = ledger.claim([Claim(bad), Claim(good)], "w", 30)
    assert [r.verdict for r in results] == [Verdict.TERMINAL, Verdict.RUN]
    assert ledger.get(bad).error.code is Reason.INVALID_REQUEST
    assert ledger.get(bad).attempt == 0


def test_a_lease_given_by_a_commit_without_an_answer_is_found_again(
    ledger: Ledger, desk: Any, migrated_url: str
) -> None:
    """The transaction is run again by its caller after it went through: the same lease, not a duplicate."""
    job_id, data, granted = desk.queued(), Database(migrated_url), {}
    first, second = (data.write(lambda c: deliveries.claim(c, [Claim(job_id)], "w1", 30, granted)) for _ in range(2))
    assert second == first or second[0].lease == first[0].lease
    assert ledger.get(job_id).attempt == 1
    assert desk.verdict(job_id, "w1") is Verdict.DUPLICATE
    data.close()


def test_a_batch_is_a_handful_of_statements(ledger: Ledger, desk: Any, succeed: Any) -> None:
    counts: list[int] = []

    def statements(work: Any) -> Any:
        seen: list[str] = []

        def note(_c: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
            seen.append(statement)

        engine = ledger._database.engine
        sa.event.listen(engine, "before_cursor_execute", note)
        result = work()
        sa.event.remove(engine, "before_cursor_execute", note)
        counts.append(len(seen))
        return result

    ids = [desk.queued() for _ in range(64)]
    results = statements(lambda: ledger.claim([Claim(i) for i in ids], "w", 30))
    leases = [r.lease for r in results]
    assert statements(lambda: ledger.renew(leases, 30)).lost == set()
    assert all(statements(lambda: ledger.release(leases[:32])))
    assert all(statements(lambda: ledger.commit([succeed(lease) for lease in leases[32:]])))
    assert max(counts) <= 8, counts


@pytest.mark.parametrize("job_id", ["a\0b", "x" * 256, ""])
def test_an_id_that_cannot_be_a_jobs_does_not_harm_its_batch(ledger: Ledger, desk: Any, job_id: str) -> None:
    good = desk.queued()
    results = ledger.claim([Claim(job_id, RAW), Claim(good)], "w", 30)
    assert [r.verdict for r in results] == [Verdict.UNKNOWN, Verdict.RUN]
    assert ledger.get(job_id) is None
