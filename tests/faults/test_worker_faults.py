"""Whatever dies, an accepted job ends in exactly one recorded outcome."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

import pytest
import sqlalchemy as sa
from headrace.contract import Job, JobRequest, JobStatus
from headrace.events import job_event
from headrace.wire import stream_key

from tests.conftest import Broker
from tests.workers import MODEL, WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow

LINES = 200
"""Jobs of a batch."""


def all_succeed(workplace: Workplace, job_ids: Sequence[str], within_s: float) -> list[Job]:
    """Every job, once it has succeeded with the one text that its prompt and seed have."""
    deadline = time.monotonic() + within_s
    jobs = [workplace.ended(job_id, within_s=max(0.1, deadline - time.monotonic())) for job_id in job_ids]
    assert {job.status for job in jobs} == {JobStatus.SUCCEEDED}
    assert len({job.result.text for job in jobs if job.result}) == 1
    engine = sa.create_engine(workplace.database_url)
    with engine.connect() as connection:
        rows = connection.execute(sa.text("SELECT job_id, COUNT(*) FROM results GROUP BY job_id")).all()
    engine.dispose()
    counts = {job_id: count for job_id, count in rows if job_id in set(job_ids)}
    assert counts == dict.fromkeys(job_ids, 1)
    workplace.ledger.check()
    return jobs


def test_a_killed_workers_jobs_are_taken_over(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    """llm-d-async 404: a hard-killed worker loses the jobs it had taken."""
    first = start_worker("w1", step_s=0.02, WORKER__LEASE_S=3)
    ids = [workplace.send(max_tokens=600).id for _ in range(32)]
    workplace.running(*ids)
    start_worker("w2", step_s=0.002, WORKER__LEASE_S=3)
    first.kill()
    jobs = all_succeed(workplace, ids, within_s=30)
    assert {job.attempt for job in jobs} == {2}
    assert {job.timings.attempts for job in jobs if job.timings} == {2}
    eventually(lambda: workplace.queued_messages() == 0, 10, "no message is left over")


def test_many_jobs_at_once_outlive_their_worker_and_have_their_results_as_they_come(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    """vllm 30268: a batch's results are written at its end, or lost with it. batch-gateway 645: it is left frozen."""
    first = start_worker("w1", step_s=0.002, WORKER__LEASE_S=2, MODEL__MAX_NUM_SEQS=8)
    request = JobRequest(model=MODEL, prompt="one of many", max_tokens=40, temperature=0.0)
    ids = [submission.job.id for submission in workplace.ledger.submit_many([request] * LINES)]

    def done() -> list[Job]:
        return [job for job in workplace.ledger.jobs(ids).values() if job.status is JobStatus.SUCCEEDED]

    early = eventually(lambda: found if len(found := done()) >= LINES // 5 else None, 30, "some have ended")
    first.kill()
    assert len(done()) < LINES, "the others were still to come"
    assert all(job.result is not None and job.result.text for job in early)
    start_worker("w2", step_s=0.002, WORKER__LEASE_S=2, MODEL__MAX_NUM_SEQS=8)
    jobs = {job.id: job for job in all_succeed(workplace, ids, within_s=60)}
    assert [jobs[job.id] for job in early] == early, "what had ended is as it was"
    assert {job.attempt for job in jobs.values()} == {1, 2}


def test_a_flushed_broker_gets_its_jobs_again(
    broker: Broker, workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker("w1", WORKER__LEASE_S=3)
    assert worker.stop() == 0
    ids = [workplace.submit(max_tokens=20).id for _ in range(32)]
    broker.flush()
    start_worker("w2", WORKER__LEASE_S=3)
    jobs = all_succeed(workplace, ids, within_s=30)
    assert {job.attempt for job in jobs} == {1}


def test_a_broker_flushed_under_queued_messages(
    broker: Broker, workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    """The messages were on the broker, and are gone: the reconciler notices."""
    start_worker("w1", step_s=0.02, MODEL__MAX_NUM_SEQS=2, WORKER__LEASE_S=3)
    ids = [workplace.submit(max_tokens=40).id for _ in range(12)]
    eventually(lambda: workplace.queued_messages() >= 8, 10, "the relay has sent them")
    broker.flush()
    all_succeed(workplace, ids, within_s=40)


def test_a_broker_restart_disturbs_no_running_job(
    broker: Broker, workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    """celery 4671, 6951: running jobs run twice after the broker's connections broke."""
    worker = start_worker("w1", step_s=0.02, WORKER__LEASE_S=10)
    start_worker("w2", step_s=0.02, WORKER__LEASE_S=10)
    sent = [workplace.send(max_tokens=200) for _ in range(8)]
    workplace.running(*(s.id for s in sent))
    broker.kill(signal.SIGTERM)
    eventually(lambda: "can't be reached" in worker.log, 10, "the worker has noticed")
    broker.start()
    jobs = all_succeed(workplace, [s.id for s in sent], within_s=30)
    assert {job.attempt for job in jobs} == {1}
    for one in sent:
        assert one.get(timeout=10)["status"] == "succeeded"
    eventually(lambda: workplace.unacked() == 0, 15, "the acknowledgements arrive")
    assert workplace.send(max_tokens=3).get(timeout=10)["status"] == "succeeded"


def test_dropped_connections_disturb_no_running_job(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    """celery 10302: after a connection reset the worker lives but never consumes again."""
    workers = [start_worker(name, step_s=0.02, WORKER__LEASE_S=10) for name in ("w1", "w2")]
    sent = [workplace.send(max_tokens=200) for _ in range(8)]
    workplace.running(*(s.id for s in sent))
    workplace.redis.client_kill_filter(_type="normal", skipme=True)
    jobs = all_succeed(workplace, [s.id for s in sent], within_s=20)
    assert {job.attempt for job in jobs} == {1}
    eventually(lambda: workplace.unacked() == 0, 15, "the acknowledgements arrive")
    assert workplace.send(max_tokens=3).get(timeout=10)["status"] == "succeeded"
    tokens = sum(workplace.pool_info(worker)["engine"]["generation_tokens"] for worker in workers)
    assert tokens == 8 * 200 + 3


def test_jobs_end_while_the_broker_is_away(
    broker: Broker, workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker("w1", step_s=0.02)
    sent = [workplace.send(max_tokens=60) for _ in range(8)]
    workplace.running(*(s.id for s in sent))
    broker.kill(signal.SIGTERM)
    all_succeed(workplace, [s.id for s in sent], within_s=10)
    broker.start()
    for one in sent:
        assert one.get(timeout=15)["status"] == "succeeded"
        last = workplace.redis.xrevrange(stream_key(one.id), count=1)[0][1][b"event"]
        assert job_event.validate_json(last).model_dump(exclude_none=True) == {
            "event": "state",
            "status": JobStatus.SUCCEEDED,
            "attempt": 1,
        }
    eventually(lambda: workplace.unacked() == 0, 15, "the acknowledgements arrive")


def test_a_worker_that_slept_past_its_lease_writes_nothing(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    sleeper = start_worker("w1", step_s=0.02, WORKER__LEASE_S=1)
    ids = [workplace.send(max_tokens=100).id for _ in range(4)]
    workplace.running(*ids)
    sleeper.signal(signal.SIGSTOP)
    awake = start_worker("w2", step_s=0.002, WORKER__LEASE_S=1)
    jobs = all_succeed(workplace, ids, within_s=20)
    sleeper.signal(signal.SIGCONT)
    eventually(lambda: sleeper.log.count("its lease was lost") >= 4, 10, "the sleeper lets go")
    eventually(lambda: workplace.unacked() == 0, 15, "its messages are acknowledged")
    info = workplace.pool_info(sleeper)["engine"]
    assert info["running"] == 0
    assert info["pages_free"] == info["pages_total"]
    for job in jobs:
        assert job.worker is not None
        assert job.worker.startswith(awake.node)
        assert workplace.job(job.id) == job


def test_a_poison_job_is_dead_lettered(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    """celery 9082: a job that kills its worker is redelivered for ever (worker-vllm 29)."""
    poison = workplace.submit(prompt="<<die:5>>", max_tokens=20, max_attempts=2)
    for n in range(2):
        worker = start_worker(f"w{n}", WORKER__LEASE_S=1, ready=False)
        assert worker.wait(20) == -signal.SIGKILL
    start_worker("w9", WORKER__LEASE_S=1)
    job = workplace.ended(poison.id, within_s=15)
    assert job.status is JobStatus.FAILED
    assert job.error is not None
    assert job.error.code == "dead_letter"
    assert job.attempt == 2
    workplace.ledger.check()
