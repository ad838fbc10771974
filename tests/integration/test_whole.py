"""The whole path with its real parts: door, client, producer, queue, worker, engine, ledger."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from headrace import Client, Job, JobFailed, JobStatus, Producer
from headrace.contract import Reason

from tests.integration.api.conftest import ApiServer, api_settings
from tests.workers import MODEL, WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow

DEMO = "smollm2-135m"


@pytest.fixture
def door(workplace: Workplace) -> Iterator[ApiServer]:
    settings = api_settings(workplace.database_url, workplace.broker_url, workplace.home)
    with ApiServer(settings).running() as server:
        yield server


@pytest.fixture
def client(door: ApiServer) -> Iterator[Client]:
    with Client(door.url) as made:
        yield made


@pytest.fixture
def producer(workplace: Workplace) -> Iterator[Producer]:
    with Producer(workplace.broker_url) as made:
        yield made


def start_demo_worker(workplace: Workplace, cache: Path) -> WorkerProcess:
    return workplace.start_worker(
        ready=False,
        CACHE=cache,
        MODEL__MODEL_PATH=DEMO,
        MODEL__ALIAS=DEMO,
        MODEL__KV_CACHE_BYTES=512 * 2**20,
        MODEL__MAX_NUM_SEQS=64,
    ).wait_ready(60)


def test_a_job_over_http_from_submit_to_the_last_token(
    door: ApiServer, client: Client, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker()
    job = client.submit("hello", model=MODEL, max_tokens=24, temperature=0)
    text = "".join(client.stream(job.id))
    done = client.wait(job.id, timeout=10)
    assert done.status is JobStatus.SUCCEEDED
    assert done.result is not None
    assert done.timings is not None
    assert done.result.text == text
    assert done.result.usage.completion_tokens == 24
    assert done.worker is not None
    assert done.worker.startswith(worker.node)
    parts = [done.timings.queue_time_ms, done.timings.generation_time_ms, done.timings.commit_time_ms]
    assert all(part is not None for part in parts)
    assert sum(part or 0.0 for part in parts) == pytest.approx(done.timings.total_time_ms, abs=2.0)
    ready = httpx.get(f"{door.url}/readyz")
    assert ready.status_code == 200, ready.text


def test_cancel_and_retry_over_http(
    client: Client, workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(step_s=0.02)
    kept = client.submit("others go on", model=MODEL, max_tokens=100, temperature=0)
    job = client.submit("this one goes", model=MODEL, max_tokens=3000, temperature=0)
    workplace.running(job.id, kept.id)
    began = time.monotonic()
    client.cancel(job.id)
    cancelled = client.wait(job.id, timeout=5)
    assert time.monotonic() - began < 1.0
    assert cancelled.status is JobStatus.CANCELLED
    assert cancelled.result is not None
    assert 0 < cancelled.result.usage.completion_tokens < 3000
    assert client.wait(kept.id, timeout=10).status is JobStatus.SUCCEEDED
    again = client.retry(job.id)
    assert again.status is JobStatus.QUEUED
    workplace.running(job.id)
    client.cancel(job.id)
    client.wait(job.id, timeout=5)
    info = workplace.pool_info(worker)["engine"]
    assert info["pages_free"] == info["pages_total"]
    workplace.ledger.check()


def test_a_producer_that_knows_only_the_broker(
    producer: Producer, workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker(step_s=0.01)
    done = producer.run("hello", model=MODEL, max_tokens=8, temperature=0, timeout=15)
    assert done.result is not None
    assert done == workplace.job(done.id)
    long = producer.submit("hello", model=MODEL, max_tokens=3000)
    workplace.running(long)
    producer.cancel(long)
    cancelled = producer.wait(long, timeout=5)
    assert cancelled.status is JobStatus.CANCELLED
    assert cancelled == workplace.job(long)
    with pytest.raises(JobFailed, match="context_length_exceeded"):
        producer.run("x" * 5000, model=MODEL, timeout=10)
    assert workplace.ledger.revision()[0] == workplace.ledger.revision()[1]


@pytest.mark.model
def test_64_jobs_at_once_are_one_batch_and_cancelling_some_leaves_the_others_alone(
    client: Client, workplace: Workplace, demo_model: Path
) -> None:
    worker = start_demo_worker(workplace, demo_model.parent.parent.parent)

    def submit(number: int) -> Job:
        return client.submit(
            f"Story number {number}: once upon a time", model=DEMO, max_tokens=48, temperature=0, ignore_eos=True
        )

    with ThreadPoolExecutor(16) as threads:
        jobs = list(threads.map(submit, range(64)))
    done = [client.wait(job.id, timeout=120) for job in jobs]
    assert {job.status for job in done} == {JobStatus.SUCCEEDED}
    assert all(job.result and job.result.usage.completion_tokens == 48 for job in done)
    assert max(job.timings.max_batch_size or 0 for job in done if job.timings) == 64
    metrics = httpx.get(worker.metrics_url).text
    assert "headrace_step_sequences_bucket" in metrics
    assert workplace.pool_info(worker)["engine"]["max_batch_size"] == 64

    texts = {job.id: job.result.text for job in done if job.result}
    again = [client.submit(f"Story number {n}: once upon a time", model=DEMO, max_tokens=48, temperature=0,
                           ignore_eos=True) for n in range(8)]  # fmt: skip
    workplace.running(*(job.id for job in again), within_s=30)
    for job in again[::2]:
        client.cancel(job.id)
    for old, job in list(zip(jobs, again, strict=False))[1::2]:
        result = client.wait(job.id, timeout=60).result
        assert result is not None
        assert len(result.text) > 0
        assert shared_prefix(result.text, texts[old.id]) > 0
    for job in again[::2]:
        ended = client.wait(job.id, timeout=5)
        assert ended.status is JobStatus.CANCELLED
        assert ended.error is not None
        assert ended.error.code is Reason.CANCELLED
    eventually(
        lambda: (info := workplace.pool_info(worker)["engine"])["pages_free"] == info["pages_total"],
        5,
        "pages are free",
    )
    assert worker.stop() == 0
    workplace.ledger.check()


def shared_prefix(one: str, other: str) -> int:
    """Characters that both begin with. In bf16 a batch of another size may break a tie of logits differently."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
