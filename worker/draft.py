"""From what the engine hands over to what the ledger records: status, result and timings of one job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.contract import JobRequest, JobResult, JobStatus, Priority, Reason, Timings
from headrace.sampling import SamplingFields

from engine.request import EngineRequest, FinishReason, RequestMetrics, RequestOutput, SamplingParams
from ledger.contract import ClaimResult, Lease, Outcome
from worker.progress import Found
from worker.result import job_result
from worker.slot import Cause, Stop

PRIORITY_NUMBERS = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}
"""As the engine counts classes: the lowest is the most urgent."""
_STOPPED = {
    Cause.CANCELLED: (JobStatus.CANCELLED, Reason.CANCELLED),
    Cause.EXPIRED: (JobStatus.EXPIRED, Reason.DEADLINE_EXCEEDED),
    Cause.TIME_LIMIT: (JobStatus.FAILED, Reason.TIME_LIMIT),
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Who ran a job, as its timings tell."""

    worker: str
    device: str
    dtype: str
    model_revision: str
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Revisions of the model's adapters, by name."""

    def revision_of(self, request: JobRequest) -> str:
        """What changes with all that decides on a job's tokens: the model's revision, and its adapter's."""
        if request.adapter is None:
            return self.model_revision
        return f"{self.model_revision}+{self.adapters.get(request.adapter, '')}"


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job that this worker has the lease of."""

    lease: Lease
    request: JobRequest
    accepted_s: float
    """When the job was accepted, on this process's monotonic clock."""
    deadline_s: float | None
    """After it the job isn't wanted, on the same clock."""
    found: Found | None = None
    """What earlier attempts have produced, if this one goes on from it."""

    @classmethod
    def from_claim(cls, claim: ClaimResult) -> ClaimedJob:
        if claim.lease is None or claim.request is None:
            raise ValueError(f"job {claim.job_id}: a granted claim carries a lease and a request")
        now_s = time.monotonic()
        deadline_s = None if claim.remaining_s is None else now_s + claim.remaining_s
        return cls(claim.lease, claim.request, now_s - claim.queued_s, deadline_s)

    def engine_request(self) -> EngineRequest:
        asked = self.request
        prompt = asked.prompt if asked.prompt is None or isinstance(asked.prompt, str) else tuple(asked.prompt)
        messages = asked.messages and tuple({"role": m.role, "content": m.content} for m in asked.messages)
        given = {name: getattr(asked, name) for name in SamplingFields.model_fields}
        if asked.embed:
            given = {"max_tokens": 0}
        params = SamplingParams(**{name: value for name, value in given.items() if value is not None})
        return EngineRequest(
            self.lease.job_id,
            params,
            prompt,
            messages or None,
            priority=PRIORITY_NUMBERS[asked.priority],
            tenant=asked.tenant,
            deadline_s=self.deadline_s,
            adapter=asked.adapter,
            namespace=asked.tenant,
            embeds=asked.embed,
            progress=self.found.progress if self.found is not None else (),
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """An outcome that lacks only the moment of its commit."""

    job: ClaimedJob
    status: JobStatus
    timings: Timings
    last_s: float
    """Monotonic moment of the last token, or of the end of a job that had none."""
    result: JobResult | None = None
    reason: Reason | None = None
    message: str | None = None

    @property
    def lease(self) -> Lease:
        return self.job.lease

    def outcome(self, commit_s: float) -> Outcome:
        """The outcome as it is committed at `commit_s` on the monotonic clock: the timings add up to it."""
        timings = self.timings.model_copy(
            update={
                "commit_time_ms": _ms(commit_s - self.last_s),
                "total_time_ms": _ms(commit_s - self.job.accepted_s),
            }
        )
        return Outcome(self.lease, self.status, self.result, self.reason, self.message, timings)


def refused(job: ClaimedJob, who: Identity, reason: Reason, message: str) -> Draft:
    """The job never reached the engine."""
    return Draft(job, JobStatus.FAILED, _timings(job, who), time.monotonic(), None, reason, message)


def stopped(job: ClaimedJob, who: Identity, stop: Stop, output: RequestOutput | None) -> Draft:
    """The job was stopped; what it had produced by then is kept."""
    status, reason = _STOPPED[stop.cause]
    if output is None:
        return Draft(job, status, _timings(job, who), time.monotonic(), None, reason, stop.message)
    return replace(_ended(job, who, output, status), reason=reason, message=stop.message)


def ended(job: ClaimedJob, who: Identity, output: RequestOutput) -> Draft:
    """The job came to its own end in the engine: its text is complete, or the engine says what went wrong."""
    if output.finish_reason is not FinishReason.ERROR:
        return _ended(job, who, output, JobStatus.SUCCEEDED)
    reason = Reason(output.error_code) if output.error_code in list(Reason) else Reason.ENGINE_ERROR
    draft = _ended(job, who, output, JobStatus.FAILED)
    brought = any(choice.text for choice in output.choices)
    return replace(draft, result=draft.result if brought else None, reason=reason, message=output.error or "failed")


def _ended(job: ClaimedJob, who: Identity, output: RequestOutput, status: JobStatus) -> Draft:
    known = output.metrics
    last_s = known.last_token_s or known.finished_s or time.monotonic()
    return Draft(job, status, _timings(job, who, output), last_s, job_result(output))


def _timings(job: ClaimedJob, who: Identity, output: RequestOutput | None = None) -> Timings:
    measured = {} if output is None else _measured(job, output)
    return Timings(
        attempts=job.lease.attempt,
        worker=who.worker,
        device=who.device,
        dtype=who.dtype,
        model_revision=who.revision_of(job.request),
        **measured,
    )


def _measured(job: ClaimedJob, output: RequestOutput) -> dict[str, Any]:
    known, counts = output.metrics, [len(choice.token_ids) for choice in output.choices] or [0]
    longest = max(counts)
    first_s, last_s, admitted_s, arrived_s = _moments(job, known)
    measured: dict[str, float | int | None] = {
        "cached_tokens": known.cached_tokens,
        "preemptions": known.preemptions,
        "mean_batch_size": known.mean_batch_size,
        "max_batch_size": known.max_batch_size,
    }
    if admitted_s is not None:
        measured["queue_time_ms"] = _ms(admitted_s - job.accepted_s)
    if admitted_s is not None and first_s is not None and last_s is not None:
        measured["time_to_first_token_ms"] = _ms(first_s - arrived_s)
        measured["prefill_time_ms"] = _ms(first_s - admitted_s)
        measured["generation_time_ms"] = _ms(last_s - admitted_s)
        measured["mean_itl_ms"] = _ms((last_s - first_s) / (longest - 1)) if longest > 1 else None
        measured["tokens_per_second"] = sum(counts) / (last_s - admitted_s) if last_s > admitted_s else None
    return measured


def _moments(job: ClaimedJob, known: RequestMetrics) -> tuple[float | None, float | None, float | None, float]:
    """First token, last token, admission and arrival. Of a text that was begun elsewhere they are the whole text's."""
    found = job.found
    if found is None:
        return known.first_token_s, known.last_token_s, known.admitted_s, known.arrived_s
    return found.first_token_s, known.last_token_s or known.finished_s, found.began_s, found.began_s


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)
