"""Submitting, looking, cancelling, retrying."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from headrace.contract import Choice, JobRequest, JobResult, JobStatus, Message, Priority, Reason

from ledger import Ledger
from ledger.contract import Claim, IdempotencyConflict, IllegalTransition, JobFilter, Outcome, Verdict

PAST = datetime(2020, 1, 1, tzinfo=UTC)


def test_a_submitted_job_is_queued_with_one_message_to_send(ledger: Ledger, desk: Any) -> None:
    request = JobRequest(
        model="m",
        messages=[Message(role="user", content="hi")],
        priority=Priority.HIGH,
        tenant="acme",
        metadata={"k": "v"},
        max_attempts=5,
        ttl_s=60,
    )
    submission = ledger.submit(request)
    job = submission.job
    assert submission.created
    assert (job.status, job.model, job.priority, job.tenant) == (JobStatus.QUEUED, "m", Priority.HIGH, "acme")
    assert (job.metadata, job.attempt, job.max_attempts) == ({"k": "v"}, 0, 5)
    assert (job.started_at, job.finished_at, job.worker, job.result, job.error) == (None,) * 5
    assert job.deadline == job.created_at + timedelta(seconds=60)
    assert desk.topics(job.id) == ["publish"]
    assert ledger.get(job.id) == job


def test_a_seed_is_drawn_once_and_a_given_one_is_kept(ledger: Ledger, desk: Any) -> None:
    drawn, other, given = desk.queued(), desk.queued(), desk.queued(seed=7)
    requests = {r.job_id: r.request for r in ledger.claim([Claim(i) for i in (drawn, other, given)], "w", 30)}
    assert requests[given].seed == 7
    assert requests[drawn].seed != requests[other].seed
    desk.lapse(drawn)
    assert ledger.claim([Claim(drawn)], "w2", 30)[0].request == requests[drawn]


def test_a_given_id_is_the_jobs_id_and_submitting_it_again_changes_nothing(ledger: Ledger, desk: Any) -> None:
    request = JobRequest(model="m", prompt="x")
    assert ledger.submit(request, "my-job").created
    again = ledger.submit(request, "my-job")
    assert (again.created, again.job.id) == (False, "my-job")
    assert desk.topics("my-job") == ["publish"]
    for other in (JobRequest(model="m", prompt="y"), JobRequest(model="m", prompt="x", tenant="t2")):
        with pytest.raises(IdempotencyConflict, match="job id"):
            ledger.submit(other, "my-job")


def test_many_are_written_together_each_as_it_would_be_alone(ledger: Ledger, desk: Any) -> None:
    known = ledger.submit(JobRequest(model="m", prompt="x", idempotency_key="k"))
    requests = [JobRequest(model="m", prompt=f"p{n}", ttl_s=60) for n in range(1100)]
    keyed = [JobRequest(model="m", prompt="x", idempotency_key=key) for key in ("k", "new", "new")]
    submissions = ledger.submit_many([*requests, *keyed])
    assert [one.created for one in submissions] == [True] * 1100 + [False, True, False]
    assert submissions[-3].job.id == known.job.id
    assert submissions[-2].job.id == submissions[-1].job.id
    assert len({one.job.id for one in submissions}) == 1102
    assert desk.topics(submissions[7].job.id) == desk.topics(submissions[-1].job.id) == ["publish"]
    results = ledger.claim([Claim(one.job.id) for one in submissions[:3]], "w", 30)
    assert [result.request and result.request.prompt for result in results] == ["p0", "p1", "p2"]


def test_of_many_none_is_written_if_one_is_refused(ledger: Ledger, sql: Any) -> None:
    good = JobRequest(model="m", prompt="x")
    with pytest.raises(ValueError, match="has passed"):
        ledger.submit_many([good, JobRequest(model="m", prompt="x", deadline=PAST)])
    ledger.submit(JobRequest(model="m", prompt="x", idempotency_key="k"))
    with pytest.raises(IdempotencyConflict):
        ledger.submit_many([good, JobRequest(model="m", prompt="y", idempotency_key="k")])
    assert sql("select count(*) from jobs") == [(1,)]


def test_an_idempotency_key_names_one_job(ledger: Ledger, desk: Any) -> None:
    request = JobRequest(model="m", prompt="x", idempotency_key="k")
    first, second = ledger.submit(request), ledger.submit(request)
    assert (first.created, second.created) == (True, False)
    assert first.job.id == second.job.id
    assert desk.topics(first.job.id) == ["publish"]
    with pytest.raises(IdempotencyConflict, match="idempotency key"):
        ledger.submit(JobRequest(model="m", prompt="y", idempotency_key="k"))


def test_a_key_answers_with_the_job_as_it_is_now(ledger: Ledger, desk: Any, succeed: Any) -> None:
    request = JobRequest(model="m", prompt="x", idempotency_key="k")
    ledger.commit([succeed(desk.claimed(ledger.submit(request).job.id))])
    assert ledger.submit(request).job.status is JobStatus.SUCCEEDED


def test_tenants_do_not_share_keys(ledger: Ledger) -> None:
    one = ledger.submit(JobRequest(model="m", prompt="x", idempotency_key="k", tenant="a"))
    two = ledger.submit(JobRequest(model="m", prompt="y", idempotency_key="k", tenant="b"))
    assert one.job.id != two.job.id


def test_a_deadline_in_the_past_is_refused_and_leaves_nothing(ledger: Ledger, sql: Any) -> None:
    """llm-d-async 353, llm-d-async 150."""
    with pytest.raises(ValueError, match="has passed"):
        ledger.submit(JobRequest(model="m", prompt="x", deadline=PAST, idempotency_key="k"))
    assert not sql("SELECT id FROM jobs")
    assert ledger.submit(JobRequest(model="m", prompt="x", idempotency_key="k")).created


def test_nul_characters_in_a_request_are_kept(ledger: Ledger, desk: Any) -> None:
    lease = desk.running(prompt="a\0b", metadata={"k": "\0"})
    desk.lapse(lease.job_id)
    [result] = ledger.claim([Claim(lease.job_id)], "w2", 30)
    assert result.request is not None
    assert result.request.prompt == "a\0b"
    assert ledger.get(lease.job_id).metadata == {"k": "\0"}


def test_get_is_limited_to_a_tenant_if_asked(ledger: Ledger, desk: Any) -> None:
    job_id = desk.queued(tenant="a")
    assert ledger.get(job_id) is not None
    assert ledger.get(job_id, tenant="a") is not None
    assert ledger.get(job_id, tenant="b") is None
    assert ledger.get("none") is None


def test_pages_walk_all_jobs_newest_first(ledger: Ledger, desk: Any, sql: Any) -> None:
    ids = [desk.queued() for _ in range(7)]
    sql("UPDATE jobs SET created_at = (SELECT max(created_at) FROM jobs) WHERE id IN (:a, :b, :c)",
        a=ids[2], b=ids[3], c=ids[4])  # fmt: skip
    seen: list[str] = []
    page = ledger.page(JobFilter(limit=3))
    while True:
        assert page.first_id == page.data[0].id
        assert page.last_id == page.data[-1].id
        seen += [job.id for job in page.data]
        if not page.has_more:
            break
        page = ledger.page(JobFilter(limit=3, after=page.last_id))
    assert sorted(seen) == sorted(ids)
    created = [ledger.get(i).created_at for i in seen]
    assert created == sorted(created, reverse=True)


def test_a_page_of_nothing(ledger: Ledger) -> None:
    page = ledger.page(JobFilter())
    assert (page.data, page.first_id, page.last_id, page.has_more) == ([], None, None, False)


def test_pages_filter(ledger: Ledger, desk: Any) -> None:
    a = desk.queued(tenant="a", model="m1")
    b = desk.succeeded(tenant="b", model="m1")
    c = desk.failed(tenant="b", model="m2")

    def ids(**where: Any) -> set[str]:
        return {job.id for job in ledger.page(JobFilter(**where)).data}

    assert ids(tenant="b") == {b, c}
    assert ids(model="m1") == {a, b}
    assert ids(status=JobStatus.FAILED) == {c}
    assert ids(tenant="b", model="m1", status=JobStatus.SUCCEEDED) == {b}
    assert ids(tenant="a", model="m2") == set()


def test_a_page_after_a_job_that_is_not_there_is_refused(ledger: Ledger, desk: Any) -> None:
    foreign = desk.queued(tenant="a")
    for where in (JobFilter(after="none"), JobFilter(after=foreign, tenant="b")):
        with pytest.raises(ValueError, match="no job"):
            ledger.page(where)


def test_a_listed_job_carries_its_result(ledger: Ledger, desk: Any) -> None:
    desk.succeeded()
    [job] = ledger.page(JobFilter()).data
    assert job.result is not None
    assert job.result.text == "Hi."


def test_cancelling_a_queued_job_ends_it_and_its_message(ledger: Ledger, desk: Any) -> None:
    job_id = desk.queued()
    job = ledger.request_cancel([job_id])[job_id]
    assert (job.status, job.error.code) == (JobStatus.CANCELLED, Reason.CANCELLED)
    assert job.finished_at is not None
    assert desk.topics(job_id) == []
    assert desk.verdict(job_id) is Verdict.TERMINAL


def test_cancelling_a_running_job_marks_it_and_tells_its_worker_once(ledger: Ledger, desk: Any) -> None:
    """OpenTranscribe 823: the status flips when the engine has let go, not before."""
    lease = desk.running()
    for _ in range(2):
        job = ledger.request_cancel([lease.job_id])[lease.job_id]
        assert (job.status, job.cancel_requested) == (JobStatus.RUNNING, True)
    assert desk.topics(lease.job_id).count("revoke") == 1
    assert ledger.renew([lease], 30).cancelled == {lease.job_id}
    assert ledger.commit([Outcome(lease, JobStatus.CANCELLED)]) == [True]
    assert desk.status(lease.job_id) is JobStatus.CANCELLED
    assert desk.topics(lease.job_id) == ["revoke"]


def test_cancelling_many_leaves_out_the_unknown_and_the_ended(ledger: Ledger, desk: Any) -> None:
    queued, running, done = desk.queued(), desk.running().job_id, desk.succeeded()
    jobs = ledger.request_cancel([queued, "none", running, done, queued])
    assert {i: job.status for i, job in jobs.items()} == {
        queued: JobStatus.CANCELLED,
        running: JobStatus.RUNNING,
        done: JobStatus.SUCCEEDED,
    }
    assert ledger.request_cancel([]) == {}


@pytest.mark.parametrize("end", ["failed", "cancelled", "expired"])
def test_a_retry_starts_over(ledger: Ledger, desk: Any, end: str) -> None:
    lease = desk.running()
    result = JobResult(text="par", finish_reason="abort")
    reason = Reason.ENGINE_ERROR if end == "failed" else None
    ledger.commit([Outcome(lease, JobStatus(end), result, reason=reason)])
    assert ledger.get(lease.job_id).result == result
    job = ledger.retry(lease.job_id)
    assert (job.status, job.attempt, job.cancel_requested) == (JobStatus.QUEUED, 0, False)
    assert (job.started_at, job.finished_at, job.worker, job.result, job.error, job.timings) == (None,) * 6
    assert desk.topics(lease.job_id) == ["publish"]
    new = desk.claimed(lease.job_id)
    assert (new.attempt, new.fence > lease.fence) == (1, True)


def test_a_retry_forgets_the_cancellation_and_its_unsent_revocation(ledger: Ledger, desk: Any) -> None:
    lease = desk.running()
    ledger.request_cancel([lease.job_id])
    ledger.commit([Outcome(lease, JobStatus.CANCELLED)])
    ledger.retry(lease.job_id)
    assert desk.topics(lease.job_id) == ["publish"]
    assert ledger.renew([desk.claimed(lease.job_id)], 30).cancelled == set()


def test_what_cannot_be_retried(ledger: Ledger, desk: Any) -> None:
    for job_id in (desk.queued(), desk.running().job_id, desk.succeeded()):
        with pytest.raises(IllegalTransition):
            ledger.retry(job_id)
    ledger.reject("bad", "m", Reason.INVALID_REQUEST, "no", "{")
    with pytest.raises(IllegalTransition, match="never was a valid request"):
        ledger.retry("bad")
    with pytest.raises(KeyError):
        ledger.retry("none")


def test_a_retry_counts_the_ttl_anew_but_a_deadline_stays(ledger: Ledger, desk: Any) -> None:
    ttl = desk.queued(ttl_s=60)
    fixed = desk.queued(deadline=ledger.now() + timedelta(seconds=60))
    for job_id in (ttl, fixed):
        desk.overdue(job_id)
        assert desk.verdict(job_id) is Verdict.EXPIRED
    job = ledger.retry(ttl)
    assert timedelta(seconds=50) < job.deadline - ledger.now() <= timedelta(seconds=60)
    with pytest.raises(IllegalTransition, match="deadline"):
        ledger.retry(fixed)


def test_counts_agree_with_the_states(ledger: Ledger, desk: Any) -> None:
    """kaapi 723."""
    desk.queued(model="a"), desk.queued(model="a"), desk.succeeded(model="a"), desk.failed(model="b")
    assert ledger.counts() == {
        "a": {JobStatus.QUEUED: 2, JobStatus.SUCCEEDED: 1},
        "b": {JobStatus.FAILED: 1},
    }


def test_cancelling_more_than_a_statement_can_name(ledger: Ledger, desk: Any) -> None:
    job_id = desk.queued()
    jobs = ledger.request_cancel([*(f"none-{n}" for n in range(70_000)), job_id])
    assert [job.status for job in jobs.values()] == [JobStatus.CANCELLED]


REPORTED = {"token": "a", "token_id": 5, "logprob": -0.5, "bytes": [97], "rank": 1, "top": []}


def test_completions_and_logprobs_are_kept_as_they_came(ledger: Ledger, desk: Any) -> None:
    lease = desk.running(n=2)
    choices = [
        Choice(index=0, text="a\x00", token_ids=[5], finish_reason="stop", stop_reason="x", logprobs=[REPORTED]),
        Choice(index=1, text="", finish_reason="length"),
    ]
    result = JobResult(text="a", token_ids=[5], choices=choices, prompt_logprobs=[None, REPORTED], logprobs=[REPORTED])
    assert ledger.commit([Outcome(lease, JobStatus.SUCCEEDED, result)]) == [True]
    job = ledger.get(lease.job_id)
    assert job is not None
    assert job.result == result


def test_a_page_leaves_out_what_may_be_large(ledger: Ledger, desk: Any) -> None:
    lease = desk.running()
    result = JobResult(text="a", choices=[Choice(index=0, text="a")], logprobs=[REPORTED], prompt_logprobs=[None])
    ledger.commit([Outcome(lease, JobStatus.SUCCEEDED, result)])
    [job] = ledger.page(JobFilter()).data
    assert job.result == JobResult(text="a")


def test_a_request_is_stored_as_a_worker_of_the_version_before_would_read_it(ledger: Ledger, desk: Any) -> None:
    """Fields that came later are left out where they say nothing, and kept where they do."""
    [row] = desk.sql("SELECT request, fingerprint FROM jobs WHERE id = :id", id=desk.queued(seed=1))
    stored = json.loads(row.request) if isinstance(row.request, str) else row.request
    assert set(stored) == {
        "model", "prompt", "messages", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
        "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "stream", "priority", "deadline", "ttl_s",
        "idempotency_key", "tenant", "metadata", "max_attempts",
    }  # fmt: skip
    assert row.fingerprint == "1507a16bf7b692212cae914f668e1e899b059afd84d56d353b5dcc68bbe03a00"
    lease = desk.running(n=2, logit_bias={5: 1.5}, response_format={"type": "json_object"})
    [row] = desk.sql("SELECT request FROM jobs WHERE id = :id", id=lease.job_id)
    stored = json.loads(row.request) if isinstance(row.request, str) else row.request
    assert (stored["n"], stored["logit_bias"], stored["response_format"]) == (2, {"5": 1.5}, {"type": "json_object"})
