"""A worker that is told to leave: what fits is finished, the rest is handed back, and nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from headrace.contract import JobStatus
from headrace.events import job_event
from headrace.wire import stream_key

from tests.workers import MODEL, ROOT, WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow

LONG = 3000


def test_a_warm_shutdown_finishes_what_runs(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    worker = start_worker(step_s=0.02)
    sent = [workplace.send(max_tokens=60) for _ in range(8)]
    workplace.running(*(s.id for s in sent))
    assert worker.stop() == 0
    for one in sent:
        assert workplace.job(one.id).status is JobStatus.SUCCEEDED
        assert one.get(timeout=1)["status"] == "succeeded"
    assert workplace.unacked() == workplace.queued_messages() == 0
    assert "everything that ended here is recorded" in worker.log
    workplace.ledger.check()


def test_no_message_is_stuck_with_a_worker_that_is_leaving(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    """Its read of the queue is under way when it stops: the next message would come to it."""
    leaving = start_worker(step_s=0.02, WORKER__DRAIN_S=20)
    workplace.running(workplace.send(max_tokens=LONG).id)
    start_worker("w2", step_s=0)
    leaving.signal(signal.SIGTERM)
    for _ in range(20):
        assert workplace.send(max_tokens=3).get(timeout=6)["status"] == "succeeded"
    assert leaving.process.poll() is None, "it was to be draining all the while"
    leaving.kill()


def test_what_does_not_fit_the_drain_is_handed_back_at_once(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    """celery 4354, celery 3802, kombu 1836."""
    worker = start_worker(WORKER__DRAIN_S=1, MODEL__MAX_NUM_SEQS=4)
    short = workplace.send(max_tokens=150)
    long = [workplace.send(max_tokens=LONG) for _ in range(3)]
    waiting = workplace.send(max_tokens=8)
    workplace.running(short.id, *(s.id for s in long))
    began = time.monotonic()
    assert worker.stop() == 0
    assert 0.9 < time.monotonic() - began < 4
    assert workplace.job(short.id).status is JobStatus.SUCCEEDED
    for one in long:
        job = workplace.job(one.id)
        assert job.status is JobStatus.QUEUED
        assert job.attempt == 0
    assert workplace.unacked() == 0
    assert workplace.queued_messages() >= 4
    start_worker("w2", step_s=0)
    for one in [*long, waiting]:
        assert one.get(timeout=15)["status"] == "succeeded"
        assert workplace.job(one.id).attempt == 1
    eventually(lambda: workplace.unacked() + workplace.queued_messages() == 0, 10, "every copy is settled")
    workplace.ledger.check()


def test_what_was_streamed_before_a_hand_back_begins_the_job_s_text(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    """A hand-back in the middle of a stop string: the part of it that was held back is not told as output."""
    first = start_worker(step_s=0.001)
    text = workplace.send(max_tokens=200).get(timeout=15)["result"]["text"]
    assert first.stop() == 0
    first = start_worker(step_s=0.05, WORKER__DRAIN_S=0)
    cut = workplace.send(max_tokens=200, stream=True, stop=text[10:150])
    workplace.running(cut.id)
    eventually(lambda: streamed(workplace, cut.id) == text[:10], 10, "the text before the stop string is out")
    time.sleep(0.3)
    assert first.stop() == 0
    assert workplace.job(cut.id).status is JobStatus.QUEUED
    start_worker("w2", step_s=0.001)
    result = workplace.ended(cut.id).result
    assert result is not None
    assert result.text == text[:10]
    assert streamed(workplace, cut.id) == text[:10] * 2


def streamed(workplace: Workplace, job_id: str) -> str:
    """All text of the job's event stream, attempt after attempt."""
    entries = workplace.redis.xrange(stream_key(job_id))
    told = [job_event.validate_json(entry[b"event"]) for _, entry in entries]
    return "".join(event.text for event in told if event.event == "token")


def test_a_second_signal_hands_everything_back_now(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(WORKER__DRAIN_S=60)
    sent = [workplace.send(max_tokens=LONG) for _ in range(4)]
    workplace.running(*(s.id for s in sent))
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    eventually(lambda: "Warm shutdown" in worker.log, 5, "the first signal is heard")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert time.monotonic() - began < 5
    assert {workplace.job(s.id).status for s in sent} == {JobStatus.QUEUED}
    assert workplace.unacked() == 0
    assert workplace.queued_messages() >= 4
    workplace.ledger.check()


def test_a_cold_shutdown_hands_everything_back(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(WORKER__DRAIN_S=60)
    sent = [workplace.send(max_tokens=LONG) for _ in range(4)]
    workplace.running(*(s.id for s in sent))
    worker.signal(signal.SIGQUIT)
    worker.wait(10)
    assert {workplace.job(s.id).status for s in sent} == {JobStatus.QUEUED}
    assert workplace.unacked() == 0
    workplace.ledger.check()


def test_a_model_that_cannot_load_ends_the_worker_with_a_line(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(ready=False, MODEL__MODEL_PATH="fake:colour=red")
    assert worker.wait() != 0
    assert "the worker can't start: the fake model has no option 'colour'" in worker.log
    assert "Traceback" not in worker.log


def test_an_engine_that_fails_ends_its_worker_and_not_its_jobs(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(step_s=0.02, WORKER__LEASE_S=2, extra=["-I", "tests.saboteur"])
    sent = [workplace.send(max_tokens=100) for _ in range(4)]
    assert worker.wait(20) != 0
    assert "the engine's thread has died" in worker.log
    assert {workplace.job(s.id).status for s in sent} <= {JobStatus.RUNNING, JobStatus.QUEUED}
    start_worker("w2", WORKER__LEASE_S=2)
    for one in sent:
        assert workplace.ended(one.id).status is JobStatus.SUCCEEDED
        assert workplace.job(one.id).attempt == 2
    workplace.ledger.check()


def test_a_request_that_fails_fails_alone(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    """BentoML 5694."""
    start_worker()
    sent = workplace.send(max_tokens=300)
    poison = workplace.send(prompt="<<raise:5>>", max_tokens=20)
    job = workplace.ended(poison.id)
    assert job.status is JobStatus.FAILED
    assert job.error is not None
    assert job.error.code == "engine_error"
    assert sent.get(timeout=10)["status"] == "succeeded"


def test_importing_the_application_loads_no_torch() -> None:
    code = "import sys, worker.app, worker.tasks; sys.exit('torch' in sys.modules or 'engine' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)


def test_headrace_worker_is_celery_with_everything_set(workplace: Workplace) -> None:
    code = (
        "from settings import settings_with; from worker.main import run_worker; "
        "run_worker(settings_with(model={'model_path': 'fake', 'max_num_seqs': 3}))"
    )
    env = {
        "HEADRACE_REDIS_URL": workplace.broker_url,
        "HEADRACE_DATABASE_URL": workplace.database_url,
        "HEADRACE_WORKER__METRICS_PORT": "0",
    }
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **env})
    try:
        assert workplace.send(max_tokens=3).get(timeout=20)["status"] == "succeeded"
        stats = workplace.app.control.inspect(timeout=2).stats()
        [(node, info)] = stats.items()
        assert node.startswith(f"{MODEL}@")
        assert info["pool"]["implementation"] == "worker.pool:EnginePool"
        assert info["pool"]["max-concurrency"] == 3
        process.terminate()
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait(5)
