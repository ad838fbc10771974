"""Stopping jobs: every way of asking, at every stage. The pages are free before the status says so."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from celery.exceptions import TaskRevokedError
from headrace.contract import Job, JobStatus, Reason, new_job_id
from headrace.errors import JobFailed
from headrace.wire import TASK_GENERATE

from ledger.contract import Dispatch, Topic
from ledger.database import make_engine
from ledger.models import RevocationRow
from ledger.transport import CeleryTransport
from tests.workers import WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow

LONG = 3000
"""Tokens that take longer than any test."""


def pages_are_free(workplace: Workplace, worker: WorkerProcess) -> None:
    info = workplace.pool_info(worker)["engine"]
    assert info["running"] == 0
    assert info["pages_free"] == info["pages_total"]


def kept_part(job: Job) -> str:
    """The text that a stopped job had produced by then."""
    assert job.result is not None
    assert 0 < len(job.result.token_ids) < LONG
    assert job.result.finish_reason == "abort"
    assert job.timings is not None
    assert job.timings.total_time_ms is not None
    return job.result.text


def revoke_by_celery(workplace: Workplace, job_id: str) -> None:
    workplace.app.control.revoke(job_id, terminate=True)


def terminate_by_celery(workplace: Workplace, job_id: str) -> None:
    workplace.app.control.terminate(job_id)


def cancel_in_the_ledger(workplace: Workplace, job_id: str) -> None:
    workplace.ledger.request_cancel([job_id])


@pytest.mark.parametrize("cancel", [revoke_by_celery, terminate_by_celery, cancel_in_the_ledger])
def test_a_running_job_is_cancelled_and_its_part_is_kept(
    cancel: Callable[[Workplace, str], None], workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    """celery 10490, celery 8147, OpenTranscribe 823."""
    worker = start_worker(WORKER__LEASE_S=2)
    raw = workplace.send(max_tokens=LONG)
    of_ledger = workplace.submit(max_tokens=LONG)
    workplace.running(raw.id, of_ledger.id)
    for job_id in (raw.id, of_ledger.id):
        began = time.monotonic()
        cancel(workplace, job_id)
        job = workplace.ended(job_id, within_s=5)
        assert job.status is JobStatus.CANCELLED
        assert job.error is not None
        assert job.error.code is Reason.CANCELLED
        assert kept_part(job)
        assert time.monotonic() - began < 1.5
    pages_are_free(workplace, worker)
    with pytest.raises(JobFailed, match="cancelled"):
        raw.get(timeout=5)
    assert raw.state == "REVOKED"
    eventually(lambda: workplace.unacked() == 0, 3, "the messages are acknowledged")
    workplace.ledger.check()


@pytest.mark.parametrize("terminate", [False, True])
def test_a_revoke_of_a_queued_job_outlives_the_worker(
    terminate: bool, workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    """celery 9844."""
    worker = start_worker(MODEL__MAX_NUM_SEQS=1)
    running = workplace.send(max_tokens=LONG)
    workplace.running(running.id)
    raw = workplace.send()
    of_ledger = workplace.submit(max_tokens=LONG)
    eventually(lambda: workplace.queued_messages() == 2, 5, "two jobs wait")
    workplace.app.control.revoke([raw.id, of_ledger.id], terminate=terminate)
    assert workplace.ended(of_ledger.id, within_s=5).status is JobStatus.CANCELLED
    with pytest.raises((JobFailed, TaskRevokedError)):  # Celery itself says so first
        raw.get(timeout=5)
    workplace.app.control.revoke(running.id, terminate=True)
    assert workplace.ended(raw.id, within_s=5).status is JobStatus.CANCELLED
    assert raw.state == "REVOKED"
    eventually(lambda: workplace.unacked() + workplace.queued_messages() == 0, 5, "no message is left")
    assert workplace.pool_info(worker)["engine"]["generation_tokens"] < LONG
    workplace.ledger.check()


def test_a_revoke_of_a_raw_job_that_still_waits_outlives_every_worker(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(MODEL__MAX_NUM_SEQS=1)
    running = workplace.send(max_tokens=LONG)
    workplace.running(running.id)
    waits = workplace.send()
    workplace.app.control.revoke(waits.id, terminate=True, reply=True, timeout=2)
    eventually(lambda: knows_revocation(workplace, waits.id), 5, "the ledger remembers it")
    worker.kill()
    workplace.redis.delete("unacked", "unacked_index")
    start_worker("w2", step_s=0)
    assert workplace.ended(waits.id, within_s=15).status is JobStatus.CANCELLED
    assert workplace.job(waits.id).attempt == 0


def knows_revocation(workplace: Workplace, job_id: str) -> bool:
    engine = make_engine(workplace.database_url)
    with engine.connect() as connection:
        found = connection.execute(sa.select(RevocationRow).where(RevocationRow.job_id == job_id)).first()
    engine.dispose()
    return found is not None


def test_a_plain_revoke_lets_a_running_job_finish(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker(step_s=0.02)
    sent = workplace.send(max_tokens=60)
    workplace.running(sent.id)
    workplace.app.control.revoke(sent.id, reply=True, timeout=2)
    assert workplace.ended(sent.id).status is JobStatus.SUCCEEDED
    assert sent.get(timeout=5)["status"] == "succeeded"


def test_a_job_cancelled_in_the_ledger_never_starts(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    job = workplace.submit(max_tokens=LONG)
    workplace.ledger.request_cancel([job.id])
    worker = start_worker()
    eventually(lambda: workplace.unacked() + workplace.queued_messages() == 0, 5, "the message is settled")
    assert workplace.job(job.id).status is JobStatus.CANCELLED
    assert workplace.pool_info(worker)["engine"]["steps"] == 0


def test_a_revoked_job_that_is_retried_runs(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    start_worker()
    job = workplace.submit(max_tokens=LONG)
    workplace.running(job.id)
    workplace.app.control.revoke(job.id, terminate=True)
    assert workplace.ended(job.id).status is JobStatus.CANCELLED
    workplace.ledger.retry(job.id)
    eventually(lambda: workplace.job(job.id).status is JobStatus.RUNNING, 5, "the retried job runs")
    workplace.app.control.revoke(job.id, terminate=True)
    assert workplace.ended(job.id).status is JobStatus.CANCELLED


def test_a_cancellation_that_is_heard_late_leaves_the_retried_job_alone(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(step_s=0.005)
    job = workplace.submit(max_tokens=400)
    workplace.running(job.id)
    workplace.ledger.request_cancel([job.id])
    assert workplace.ended(job.id).status is JobStatus.CANCELLED
    workplace.ledger.retry(job.id)
    eventually(lambda: workplace.job(job.id).status is JobStatus.RUNNING, 5, "the retried job runs")
    late = CeleryTransport(workplace.broker_url)
    late.revoke([Dispatch(0, Topic.REVOKE, job.id, job.model, "normal", fence=1)])
    late.close()
    assert workplace.pool_info(worker), "the worker has heard it by then"
    assert workplace.ended(job.id).status is JobStatus.SUCCEEDED


@pytest.mark.parametrize("limit", ["time_limit", "soft_time_limit"])
def test_a_time_limit_of_the_message_fails_the_job(
    limit: str, workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker()
    sent = workplace.send(max_tokens=LONG, options={limit: 0.5})
    with pytest.raises(Exception, match=r"time_limit: .*time limit of 0\.5 s exceeded"):
        sent.get(timeout=5)
    job = workplace.job(sent.id)
    assert job.status is JobStatus.FAILED
    assert job.error is not None
    assert job.error.code is Reason.TIME_LIMIT
    assert kept_part(job)
    pages_are_free(workplace, worker)


def test_time_limits_of_the_command_line_and_of_control(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(extra=["--time-limit", "0.5"])
    assert workplace.ended(workplace.send(max_tokens=LONG).id, within_s=5).error is not None
    workplace.app.control.time_limit(TASK_GENERATE, soft=0.2, hard=0.3, reply=True, destination=[worker.node])
    job = workplace.ended(workplace.send(max_tokens=LONG).id, within_s=5)
    assert job.error is not None
    assert "0.2 s" in job.error.message


def test_a_deadline_stops_a_running_job_and_keeps_its_part(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    """warmbly 333."""
    worker = start_worker()
    sent = workplace.send(max_tokens=LONG, ttl_s=1.0)
    with pytest.raises(Exception, match="deadline_exceeded: "):
        sent.get(timeout=8)
    job = workplace.job(sent.id)
    assert job.status is JobStatus.EXPIRED
    assert kept_part(job)
    pages_are_free(workplace, worker)


def test_messages_that_expired_in_the_queue_never_start(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    by_celery = workplace.send(options={"expires": 0.1})
    by_deadline = workplace.submit(ttl_s=0.1)
    eventually(lambda: time.time() > by_deadline.created_at.timestamp() + 0.2, 2, "both have expired")
    worker = start_worker()
    for job_id in (by_celery.id, by_deadline.id):
        assert workplace.ended(job_id, within_s=5).status is JobStatus.EXPIRED
    with pytest.raises(Exception, match="deadline_exceeded: "):
        by_celery.get(timeout=5)
    assert workplace.pool_info(worker)["engine"]["steps"] == 0


def test_terminating_an_unknown_job_harms_nobody(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker()
    workplace.app.control.revoke([new_job_id(), "no good/id"], terminate=True, reply=True, timeout=2)
    assert workplace.send(max_tokens=3).get(timeout=10)["status"] == "succeeded"
