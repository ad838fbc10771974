"""A job keeps the trace that it was asked for in, whatever becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.contract import JobRequest, JobStatus, Reason
from headrace.tracing import EXAMPLE

from ledger import Ledger
from ledger.contract import Claim, JobFilter, Lease, Verdict

OTHER = EXAMPLE.replace("4bf9", "5bf9")


def handed_out(ledger: Ledger, job_id: str) -> list[str | None]:
    """The trace in each message about the job that is to be sent; they are sent."""
    rows = ledger.outbox(10)
    ledger.sent([row.id for row in rows])
    return [row.traceparent for row in rows if row.job_id == job_id]


def claimed(ledger: Ledger, claim: Claim) -> Lease:
    [result] = ledger.claim([claim], "w1", 30)
    assert result.verdict is Verdict.RUN
    assert result.request is not None
    assert result.request.traceparent == EXAMPLE
    assert result.lease is not None
    return result.lease


def test_every_message_about_a_job_names_it(ledger: Ledger, desk: Any, succeed: Callable[..., Any]) -> None:
    job = ledger.submit(JobRequest(model="m", prompt="x", traceparent=EXAMPLE)).job
    assert job.traceparent == EXAMPLE
    assert handed_out(ledger, job.id) == [EXAMPLE]
    assert ledger.release([claimed(ledger, Claim(job.id))]) == [True]
    assert handed_out(ledger, job.id) == [EXAMPLE], "handed back"
    claimed(ledger, Claim(job.id))
    desk.lapse(job.id)
    assert ledger.reap() == 1
    assert handed_out(ledger, job.id) == [EXAMPLE], "lost with its worker"
    assert ledger.republish([job.id]) == 1
    assert handed_out(ledger, job.id) == [EXAMPLE], "lost by the broker"
    assert ledger.request_cancel([job.id])[job.id].traceparent == EXAMPLE
    assert ledger.retry(job.id).traceparent == EXAMPLE
    assert handed_out(ledger, job.id) == [EXAMPLE], "asked for once more"
    [ended] = ledger.record([succeed(claimed(ledger, Claim(job.id)))])
    assert ended is not None
    assert ended.traceparent == EXAMPLE
    assert ledger.get(job.id) == ledger.page(JobFilter()).data[0]


def test_a_raw_messages_job_has_its_own(ledger: Ledger, desk: Any) -> None:
    claim = Claim("raw-1", JobRequest(model="m", prompt="x", traceparent=EXAMPLE))
    claimed(ledger, claim)
    desk.lapse("raw-1")
    assert claimed(ledger, claim).attempt == 2
    ledger.reject("raw-2", "m", Reason.INVALID_REQUEST, "no", "{}", EXAMPLE)
    job = ledger.get("raw-2")
    assert job is not None
    assert (job.status, job.traceparent) == (JobStatus.FAILED, EXAMPLE)


def test_a_key_that_comes_again_in_another_trace_gives_the_same_job(ledger: Ledger) -> None:
    first, again, untraced = (
        ledger.submit(JobRequest(model="m", prompt="x", idempotency_key="k", traceparent=traceparent))
        for traceparent in (EXAMPLE, OTHER, None)
    )
    assert (first.created, again.created, untraced.created) == (True, False, False)
    assert again.job == untraced.job == first.job
    assert first.job.traceparent == EXAMPLE


def test_most_jobs_have_none(ledger: Ledger, desk: Any) -> None:
    job_id = desk.queued()
    assert handed_out(ledger, job_id) == [None]
    [result] = ledger.claim([Claim(job_id)], "w1", 30)
    assert result.request is not None
    assert result.request.traceparent is None
