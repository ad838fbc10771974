"""A worker and producers with OpenTelemetry's own instrumentation of Celery."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from headrace import Producer
from headrace.contract import JobRequest, JobStatus
from headrace.tracing import current
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider

from tests.traced import VARIABLE
from tests.workers import MODEL, WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow

FIELDS: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 300, "temperature": 0.0}


@pytest.fixture
def tracer() -> Iterator[trace.Tracer]:
    """Of a service that is instrumented."""
    provider = TracerProvider()
    CeleryInstrumentor().instrument(tracer_provider=provider)
    yield provider.get_tracer("service")
    CeleryInstrumentor().uninstrument()


def by_celery(place: Workplace) -> str:
    return place.send(**FIELDS).id


def by_the_producer(place: Workplace) -> str:
    with Producer(place.broker_url) as producer:
        return producer.submit(**FIELDS)


def many_by_the_producer(place: Workplace) -> str:
    with Producer(place.broker_url) as producer:
        return producer.submit_many([JobRequest(**FIELDS)])[0]


def by_the_ledger(place: Workplace) -> str:
    """As a door does: the message is sent by a relay, which is in an instrumented worker."""
    return place.ledger.submit(JobRequest(**FIELDS, traceparent=current())).job.id


def test_an_attempts_span_is_in_its_producers_trace(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess], tracer: trace.Tracer, tmp_path: Path
) -> None:
    """opentelemetry-python-contrib 1002: each task begins a trace of its own."""
    spans = tmp_path / "spans"
    start: dict[str, Any] = {"extra": ("-I", "tests.traced"), "environ": {VARIABLE: str(spans)}, "WORKER__LEASE_S": 2}
    first = start_worker("w1", step_s=0.02, **start)
    asked: dict[str, str] = {}
    for submit in (by_celery, by_the_producer, many_by_the_producer, by_the_ledger):
        with tracer.start_as_current_span("a request") as span:
            asked[submit(workplace)] = f"0x{span.get_span_context().trace_id:032x}"
    assert len(set(asked.values())) == len(asked)
    workplace.running(*asked)
    first.kill()
    start_worker("w2", step_s=0.002, **start)
    for job_id, trace_id in asked.items():
        job = workplace.ended(job_id, within_s=30)
        assert (job.status, job.attempt) == (JobStatus.SUCCEEDED, 2)
        assert job.traceparent is not None
        assert job.traceparent.split("-")[1] == trace_id.removeprefix("0x")
    runs = eventually(lambda: found if len(found := ended(spans, "run/headrace.generate")) >= len(asked) else None)
    assert {run["attributes"]["messaging.message.id"]: run["context"]["trace_id"] for run in runs} == asked
    sent = ended(spans, "apply_async/headrace.generate")
    assert {run["parent_id"] for run in runs} <= {one["context"]["span_id"] for one in sent}, "the relay's spans"
    for one in sent:
        assert asked[one["attributes"]["messaging.message.id"]] == one["context"]["trace_id"]


def ended(path: Path, name: str) -> list[dict[str, Any]]:
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    return [span for span in spans if span["name"] == name]
