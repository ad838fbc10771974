"""One trace from whoever asks for a job to each of its attempts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from headrace import Producer
from headrace.contract import JobStatus
from headrace.tracing import trace_id
from headrace.wire import queue_keys

from ledger.migrate import upgrade
from tests.conftest import Broker
from tests.faults.stage import LEASE_S, Stage
from tests.workers import MODEL, WorkerProcess, eventually

pytestmark = pytest.mark.slow

FIELDS: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 300, "temperature": 0.0}


@pytest.fixture
def stage(broker: Broker, database_url: str, tmp_path: Path) -> Iterator[Stage]:
    """An API that knows the model, and nobody who takes its jobs."""
    upgrade(database_url)
    stage = Stage.open(broker, database_url, tmp_path, workers=1)
    assert stage.workers[0].stop() == 0
    yield stage
    stage.close()


def start_worker(stage: Stage, name: str) -> WorkerProcess:
    """One that logs each attempt."""
    return stage.place.start_worker(name, step_s=0.02, extra=("-l", "DEBUG"), WORKER__LEASE_S=LEASE_S)


def test_a_job_is_in_its_askers_trace_at_every_attempt(stage: Stage) -> None:
    """opentelemetry-python-contrib 1002: the API's trace and the worker's are not linked."""
    asked = submitted(stage)
    eventually(lambda: traces_on_the_broker(stage) == asked, 10, "each message has its job's trace")
    first = start_worker(stage, "first")
    stage.place.running(*asked)
    first.kill()
    eventually(lambda: traces_on_the_broker(stage) == asked, 15, "they are handed out again")
    second = start_worker(stage, "second")
    for job_id, traceparent in asked.items():
        job = stage.place.ended(job_id, within_s=30)
        assert (job.status, job.attempt, job.traceparent) == (JobStatus.SUCCEEDED, 2, traceparent)
        assert httpx.get(f"{stage.api.url}/v1/jobs/{job_id}").json()["traceparent"] == traceparent
        named = f"job {job_id} (trace {trace_id(traceparent)})"
        assert f"{named}: attempt 1 begins" in first.log
        assert f"{named}: attempt 2 begins" in second.log
        assert f"{named} goes on after" in second.log


def submitted(stage: Stage) -> dict[str, str]:
    """Jobs of every door, each with the span that asks for it."""
    spans = [f"00-{number:032x}-{number:016x}-01" for number in range(1, 6)]
    door = f"{stage.api.url}/v1/jobs"
    by_header = httpx.post(door, json=FIELDS, headers={"traceparent": spans[0]})
    by_field = httpx.post(door, json={**FIELDS, "traceparent": spans[1]}, headers={"traceparent": spans[0]})
    by_client = stage.client.submit(**FIELDS, traceparent=spans[2])
    with Producer(stage.broker.url) as producer:
        by_producer = producer.submit(**FIELDS, traceparent=spans[3])
    by_celery = stage.place.send(**FIELDS, options={"headers": {"traceparent": spans[4]}})
    ids = [by_header.json()["id"], by_field.json()["id"], by_client.id, by_producer, by_celery.id]
    return dict(zip(ids, spans, strict=True))


def traces_on_the_broker(stage: Stage) -> dict[str, str]:
    """By job: what the messages that wait have for whoever takes them."""
    messages = [json.loads(text) for key in queue_keys(MODEL) for text in stage.place.redis.lrange(key, 0, -1)]
    return {message["headers"]["id"]: message["headers"].get("traceparent") for message in messages}


def test_what_is_refused_is_in_its_senders_trace(stage: Stage) -> None:
    """A malformed request, and a message that can't be read at all."""
    traceparent = f"00-{7:032x}-{7:016x}-01"
    worker = start_worker(stage, "only")
    headers = {"traceparent": traceparent}
    malformed = stage.place.send(**{**FIELDS, "max_tokens": -1}, options={"headers": headers})
    unreadable = stage.place.send(**FIELDS, options={"headers": {**headers, "shadow": 7}})
    for sent in (malformed, unreadable):
        job = stage.place.ended(sent.id)
        assert (job.status, job.traceparent) == (JobStatus.FAILED, traceparent)
    assert f"'{unreadable.id}' (trace {trace_id(traceparent)})): the task's name to be shown" in worker.log


def test_a_trace_that_is_none_keeps_no_job_from_running(stage: Stage) -> None:
    """As a header it is ignored, wherever it comes from; whoever writes it into a request is told."""
    door = f"{stage.api.url}/v1/jobs"
    by_header = httpx.post(door, json=FIELDS, headers={"traceparent": "00-abc"})
    assert (by_header.status_code, by_header.json()["traceparent"]) == (202, None)
    twice = httpx.post(door, json=FIELDS, headers=[("traceparent", f"00-{n:032x}-{n:016x}-01") for n in (1, 2)])
    assert (twice.status_code, twice.json()["traceparent"]) == (202, None)
    refused = httpx.post(door, json={**FIELDS, "traceparent": "00-abc"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "traceparent")
    by_celery = [stage.place.send(**FIELDS, options={"headers": {"traceparent": odd}}) for odd in ("00-abc", 7, {})]
    start_worker(stage, "only")
    for job_id in (by_header.json()["id"], twice.json()["id"], *(sent.id for sent in by_celery)):
        job = stage.place.ended(job_id, within_s=30)
        assert (job.status, job.traceparent) == (JobStatus.SUCCEEDED, None)
