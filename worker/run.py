"""A job's way through the worker: claim, generate, commit, tell. Runs in the job's greenlet and parks between."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from celery import states
from celery.utils.log import get_logger
from headrace.contract import Job, JobStatus, Reason
from headrace.counting import counted
from headrace.outcome import celery_outcome

from engine.request import FinishReason, RequestOutput
from ledger.contract import Claim, ClaimResult, Verdict
from worker.celery_result import put_result
from worker.draft import ClaimedJob, Draft, ended, refused, stopped
from worker.failures import Dropped, HandedBack, JobFailed, Malformed, Revoked
from worker.generation import Generation
from worker.intake import raw_text, read_claim, rejected_id
from worker.job_stream import Outgoing
from worker.orders import Rejection
from worker.progress import Found, Question
from worker.slot import Cause, Slot, Stop

log = get_logger(__name__)

SAVE_WITHIN_S = 1.0
"""How long a job that is handed back waits for its tokens to be put down; without them they are computed again."""


def run(slot: Slot, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Generation:
    """Take one delivery to its end: a result, or one of `worker.failures`."""
    services = slot.services
    try:
        claim = traced(read_claim(slot.task_id, args, kwargs, services.model), slot.traceparent)
    except Malformed as exc:
        reject(slot, exc, raw_text(args, kwargs))
    if claim.request is None:
        slot.message.forget_hearsay()
    result = claimed(slot, claim)
    if result.verdict is not Verdict.RUN:
        turned_away(slot, result)
    job = ClaimedJob.from_claim(result)
    slot.job_id, slot.fence, slot.traceparent = job.lease.job_id, job.lease.fence, job.request.traceparent
    log.debug("job %s: attempt %d begins", slot.named, job.lease.attempt)
    if slot.cancelled_fence == slot.fence:
        slot.pool.cancel_attempt(slot.job_id, slot.fence)
    try:
        return finish(slot, work(slot, job))
    except Dropped:
        services.telemetry.drop(slot.job_id)
        raise
    except (JobFailed, Revoked, HandedBack):
        raise
    except Exception:
        # Whatever it was, the job ends here and says so: it is not left to run out of leases.
        log.exception("job %s: the worker failed", slot.named)
        return finish(slot, refused(job, services.identity, Reason.ENGINE_ERROR, "the worker failed; see its log"))


def traced(claim: Claim, traceparent: str | None) -> Claim:
    """A raw message's job belongs to the message's trace, unless the request names another."""
    if traceparent is None or claim.request is None or claim.request.traceparent is not None:
        return claim
    return replace(claim, request=claim.request.model_copy(update={"traceparent": traceparent}))


def claimed(slot: Slot, claim: Claim) -> ClaimResult:
    """Claim the job once it may be in the engine, beside others or, if it is to be alone, by itself."""
    writer, gate = slot.services.writer, slot.pool.gate
    if gate.closed:
        pass_gate(slot, gate.enter)
    else:
        gate.enter(slot, _entered)
    result = slot.park(writer.claim, claim)
    if result.verdict is Verdict.ALONE:
        log.info("job %s was lost with its workers: its last attempt runs alone", slot.named)
        gate.leave(slot)
        pass_gate(slot, gate.enter_alone)
        result = slot.park(writer.claim, replace(claim, alone=True))
    return result


def pass_gate(slot: Slot, enter: Callable[[Slot, Any], None]) -> None:
    """Wait at the gate. A job that is to be handed back goes at once: it isn't claimed."""
    slot.park(enter, slot)
    if slot.stop is not None and slot.stop.cause is Cause.HAND_BACK:
        raise HandedBack(slot.stop.message)


def _entered(_: None) -> None:
    """It didn't have to wait."""


def reject(slot: Slot, exc: Malformed, raw: str) -> NoReturn:
    """Record a message that is no job as a failed one, and fail."""
    services = slot.services
    job_id = rejected_id(slot.task_id)
    rejection = Rejection(job_id, exc.model or services.model, exc.reason, str(exc), raw, slot.traceparent)
    slot.park(services.writer.reject, rejection)
    services.metrics.count(JobStatus.FAILED, exc.reason.value)
    fail(slot, job_id, exc.reason, str(exc))


def turned_away(slot: Slot, result: ClaimResult) -> NoReturn:
    """The claim was not granted: the ledger has ended the job already, or somebody else has it."""
    match result.verdict:
        case Verdict.CANCELLED:
            slot.services.telemetry.end(result.job_id, 0, JobStatus.CANCELLED)
            revoke(slot, result.job_id, "revoked")
        case Verdict.EXPIRED:
            slot.services.telemetry.end(result.job_id, 0, JobStatus.EXPIRED)
            fail(slot, result.job_id, Reason.DEADLINE_EXCEEDED, "the deadline passed before the job could run")
        case Verdict.DEAD:
            slot.services.telemetry.end(result.job_id, 0, JobStatus.FAILED)
            fail(slot, result.job_id, Reason.DEAD_LETTER, "the job's attempts are used up")
        case Verdict.UNKNOWN:
            fail(slot, result.job_id, Reason.INVALID_REQUEST, f"no job has the id {result.job_id!r}")
        case Verdict.TERMINAL:
            # Perhaps its worker died between the commit and the result.
            store_outcome(slot, result.job_id)
            raise Dropped(f"job {result.job_id} has ended")
        case _:
            raise Dropped(f"job {result.job_id}: {result.verdict.value}")


def work(slot: Slot, job: ClaimedJob) -> Draft:
    """Generate, unless the job is to be stopped or refused before it begins."""
    services = slot.services
    if job.request.model != services.model:
        return refused(job, services.identity, Reason.MODEL_NOT_FOUND, "the job's model is not on this queue")
    if job.lease.fence > 1:
        job = replace(job, found=progress_of(slot, job))
    said = slot.message.revocation
    if said is not None and slot.stop is None:
        cause = Cause.EXPIRED if said.expired else Cause.CANCELLED
        slot.stop = Stop(cause, "the message had expired" if said.expired else "revoked", time.monotonic())
    if slot.stop is not None:
        return halted(slot, job, slot.stop, None)
    revision = services.identity.revision_of(job.request)
    services.telemetry.begin(job.lease.job_id, job.lease.attempt, job.request.stream, revision)
    return judge(slot, job, slot.generate(job.engine_request()))


def progress_of(slot: Slot, job: ClaimedJob) -> Found | None:
    """What earlier attempts at the job have produced."""
    services = slot.services
    question = Question(job.lease.job_id, job.request.stream, services.identity.revision_of(job.request))
    found = slot.park(services.progress.read, question)
    if found is not None:
        tokens = sum(len(one.token_ids) for one in found.progress)
        log.info("job %s goes on after %s", slot.named, counted(tokens, "token"))
    return found


def judge(slot: Slot, job: ClaimedJob, output: RequestOutput) -> Draft:
    """What became of a job that the engine has let go of."""
    services = slot.services
    if slot.stop is not None and slot.stop.cause is Cause.LOST:
        return halted(slot, job, slot.stop, output)
    if output.finish_reason is FinishReason.ABORT:
        if output.error_code == Reason.DEADLINE_EXCEEDED and slot.stop is None:
            slot.stop = Stop(Cause.EXPIRED, "the deadline passed while the job ran", job.deadline_s or time.monotonic())
        # Without a stop of ours the engine itself gave up: another worker may do better.
        stop = slot.stop or Stop(Cause.HAND_BACK, "the engine stopped", time.monotonic())
        return halted(slot, job, stop, output)
    if output.finish_reason is FinishReason.ERROR and not services.engine.healthy:
        # Perhaps this very job broke the engine. Its attempt stays counted: the lease runs out, and the ledger decides.
        services.writer.forget(job.lease.job_id)
        raise Dropped(f"job {job.lease.job_id}: the engine failed, its lease will run out")
    return ended(job, services.identity, output)


def halted(slot: Slot, job: ClaimedJob, stop: Stop, output: RequestOutput | None) -> Draft:
    """The engine has let go of a job that was stopped: its pages are free."""
    services = slot.services
    if output is not None and output.metrics.finished_s is not None:
        services.metrics.stopped(max(0.0, output.metrics.finished_s - stop.asked_s))
    if stop.cause is Cause.LOST:
        raise Dropped(f"job {job.lease.job_id}: {stop.message}")
    if stop.cause is Cause.HAND_BACK:
        slot.stop = stop
        if output is not None:
            slot.park(services.telemetry.save, job.lease.job_id, within_s=SAVE_WITHIN_S)
        if not slot.park(services.writer.release, job.lease):
            raise Dropped(f"job {job.lease.job_id}: its lease was lost before it was handed back")
        services.telemetry.end(job.lease.job_id, job.lease.attempt, JobStatus.QUEUED)
        raise HandedBack(stop.message)
    return stopped(job, services.identity, stop, output)


def finish(slot: Slot, draft: Draft) -> Generation:
    """Commit; then tell the stream, the waiters and Celery."""
    services = slot.services
    recorded = slot.park(services.writer.commit, draft)
    job_id = draft.lease.job_id
    slot.recorded = True
    if recorded is None:
        raise Dropped(f"job {job_id}: its lease was lost, its outcome is another's")
    outcome, job = recorded.outcome, recorded.job
    services.metrics.ended(outcome)
    services.telemetry.end(job_id, outcome.lease.attempt, outcome.status)
    failure: JobFailed | None = None
    if outcome.status is not JobStatus.SUCCEEDED and outcome.status is not JobStatus.CANCELLED:
        failure = JobFailed.because(outcome.reason or Reason.ENGINE_ERROR, outcome.message or outcome.status.value)
    tell_outcome(slot, job, failure)
    if outcome.status is JobStatus.CANCELLED:
        raise Revoked("terminated")
    if failure is not None:
        raise failure
    if outcome.result is None or outcome.timings is None:
        raise ValueError(f"job {job_id}: a success has a result and timings")
    return Generation(job_id, outcome.result, outcome.timings)


def fail(slot: Slot, job_id: str, reason: Reason, message: str) -> NoReturn:
    """FAILURE in Celery, with the reason."""
    failure = JobFailed.because(reason, message)
    store_outcome(slot, job_id, failure)
    raise failure


def revoke(slot: Slot, job_id: str, why: str) -> NoReturn:
    """REVOKED in Celery."""
    store_outcome(slot, job_id)
    raise Revoked(why)


def store_outcome(slot: Slot, job_id: str, failure: JobFailed | None = None) -> None:
    """Put the job's end where `AsyncResult` looks for it, off the hub thread, before the acknowledgement.

    It is read from the ledger, so that Celery never says anything else. `failure` stands for a job that has no row.
    Whoever waits for a chain waits for its last task: a failure is the end of all that come after it.
    """
    if slot.message.wants_result:
        tell_outcome(slot, slot.park(slot.services.writer.look, job_id), failure)


def tell_outcome(slot: Slot, job: Job | None, failure: JobFailed | None) -> None:
    """The same for a job as the ledger has it, if it has it."""
    ended = job if job is not None and job.status.terminal else None
    if not slot.message.wants_result or (ended is None and failure is None):
        return
    backend = slot.services.app.backend

    def compose(out: Outgoing) -> None:
        state, value = celery_outcome(ended) if ended is not None else (states.FAILURE, failure)
        put_result(out, backend, slot.task_id, value, state, anew=job is None)
        if state != states.SUCCESS:
            for task_id in slot.message.chained_ids:
                put_result(out, backend, task_id, value, state, anew=True)

    slot.park(slot.services.telemetry.result, compose)
