"""A broker that is there and says nothing: a stopped process, or a network that swallows packets."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from headrace.contract import JobStatus

from tests.conftest import Broker
from tests.workers import WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow

LONG = 3000


def test_jobs_end_are_cancelled_and_run_out_of_time_meanwhile(
    broker: Broker, workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(step_s=0.02, WORKER__LEASE_S=3)
    short = [workplace.send(max_tokens=60), workplace.submit(max_tokens=60)]
    cancelled, limited = workplace.submit(max_tokens=LONG), workplace.submit(max_tokens=LONG, ttl_s=8)
    goes_on = workplace.submit(max_tokens=LONG)
    workplace.running(*(job.id for job in (*short, cancelled, limited, goes_on)))
    broker.kill(signal.SIGSTOP)
    try:
        workplace.ledger.request_cancel([cancelled.id])
        assert workplace.ended(cancelled.id, within_s=12).status is JobStatus.CANCELLED
        for job in short:
            assert workplace.ended(job.id, within_s=12).status is JobStatus.SUCCEEDED
        assert workplace.ended(limited.id, within_s=15).status is JobStatus.EXPIRED
        eventually(lambda: "can't be reached" in worker.log, 10, "the worker says why it takes no jobs")
        assert workplace.job(goes_on.id).status is JobStatus.RUNNING
    finally:
        broker.kill(signal.SIGCONT)
    assert workplace.send(max_tokens=3).get(timeout=20)["status"] == "succeeded"
    workplace.ledger.request_cancel([goes_on.id])
    assert workplace.ended(goes_on.id).attempt == 1
    eventually(lambda: workplace.unacked() == 0, 20, "the acknowledgements arrive")
    assert "Traceback" not in worker.log


def test_a_worker_leaves_as_it_is_told_to(
    broker: Broker, workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(step_s=0.02, WORKER__LEASE_S=3, WORKER__DRAIN_S=5)
    short, long = workplace.send(max_tokens=150), workplace.send(max_tokens=LONG)
    workplace.running(short.id, long.id)
    broker.kill(signal.SIGSTOP)
    try:
        assert worker.stop(within_s=30) == 0
        assert "Traceback" not in worker.log
        assert workplace.job(short.id).status is JobStatus.SUCCEEDED
        assert workplace.job(long.id).status is JobStatus.QUEUED
    finally:
        broker.kill(signal.SIGCONT)
    start_worker("w2", step_s=0)
    assert workplace.ended(long.id, within_s=30).status is JobStatus.SUCCEEDED
