"""Jobs through a real worker process: broker, pool, engine, ledger and back."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

import pytest
import redis
from headrace.contract import Job, JobStatus, Priority, new_job_id, utc_now
from headrace.events import StateEvent, TokenEvent, job_event
from headrace.wire import (
    DONE_CHANNEL,
    STREAM_TTL_S,
    TASK_EMBED,
    TASK_GENERATE,
    WORKER_KEY_TTL_S,
    message_options,
    queue_name,
    stream_key,
    worker_key,
)

from tests.workers import MODEL, WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow


def test_a_raw_producers_result_equals_the_ledgers(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker()
    sent = workplace.send(max_tokens=12)
    watched = workplace.app.AsyncResult(sent.id)
    result = watched.get(timeout=10)
    watched.forget()
    job = workplace.job(sent.id)
    assert job.status is JobStatus.SUCCEEDED
    assert job.result is not None
    assert job.timings is not None
    assert Job.model_validate(result) == job
    assert job.result.finish_reason == "length"
    assert len(job.result.token_ids) == job.result.usage.completion_tokens == 12
    assert job.attempt == job.timings.attempts == 1
    assert job.timings.worker == worker.node
    eventually(lambda: workplace.unacked() == 0, 2, "the message is acknowledged")
    assert workplace.queued_messages() == 0
    assert worker.stop() == 0
    workplace.ledger.check()


WITHOUT_THE_PACKAGE = """
import sys
sys.modules["headrace"] = None  # as if it weren't installed
from celery import Celery
try:
    Celery(backend=sys.argv[1]).AsyncResult(sys.argv[2]).get(timeout=15)
except Exception as error:
    print(type(error).__name__, error.args[0]["id"], error.args[0]["error"]["code"])
"""


def test_a_producer_without_the_package_gets_the_job_that_failed(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker()
    sent = workplace.send(max_tokens="many")
    command = [sys.executable, "-c", WITHOUT_THE_PACKAGE, workplace.broker_url, sent.id]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.split() == ["JobFailed", sent.id, "invalid_request"], told.stderr


def test_sixty_four_jobs_at_once_run_in_one_batch(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(step_s=0.02)
    sent = [workplace.send(max_tokens=60, prompt=f"job {n}") for n in range(64)]
    for result in sent:
        assert result.get(timeout=15)["status"] == "succeeded"
    jobs = [workplace.job(result.id) for result in sent]
    assert max(job.timings.max_batch_size or 0 for job in jobs if job.timings) == 64
    assert len({job.result.text for job in jobs if job.result}) > 1
    info = workplace.pool_info(worker)["engine"]
    assert info["max_batch_size"] == 64
    assert info["running"] == 0
    assert info["pages_free"] == info["pages_total"]
    workplace.ledger.check()


def test_timings_add_up(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    start_worker(step_s=0.01)
    sent = workplace.send(max_tokens=20)
    sent.get(timeout=10)
    timings = workplace.job(sent.id).timings
    assert timings is not None
    assert timings.queue_time_ms is not None
    assert timings.prefill_time_ms is not None
    assert timings.generation_time_ms is not None
    assert timings.mean_itl_ms is not None
    assert timings.commit_time_ms is not None
    assert timings.total_time_ms is not None
    assert timings.time_to_first_token_ms is not None
    assert timings.tokens_per_second is not None
    parts = timings.queue_time_ms + timings.generation_time_ms + timings.commit_time_ms
    assert abs(parts - timings.total_time_ms) < 0.01
    assert abs(timings.prefill_time_ms + 19 * timings.mean_itl_ms - timings.generation_time_ms) < 0.1
    assert timings.time_to_first_token_ms >= timings.prefill_time_ms
    assert abs(timings.tokens_per_second - 20_000 / timings.generation_time_ms) < 0.1
    assert timings.mean_itl_ms >= 10
    assert timings.device == "fake"
    assert timings.model_revision == "fake-1"


def test_a_ledger_job_needs_only_its_id(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    start_worker()
    job = workplace.submit(max_tokens=5, priority="high")
    workplace.app.send_task(
        TASK_GENERATE, kwargs={"job_id": job.id}, **message_options(job.id, MODEL, Priority.HIGH), ignore_result=True
    )
    ended = workplace.ended(job.id)
    assert ended.status is JobStatus.SUCCEEDED


def test_a_text_becomes_a_vector(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    """By its own task, by the other one that says so, and through the ledger. The fake model's vectors are means."""
    start_worker()
    raw = workplace.app.send_task(
        TASK_EMBED, kwargs={"model": MODEL, "prompt": "hello"}, task_id=new_job_id(), queue=queue_name(MODEL)
    )
    said = workplace.send(prompt=list(b"hello"), embed=True, n=3, max_tokens=100)
    submitted = workplace.submit(embed=True)
    mean = [sum(b"hello") / 5, 2.0]
    for job_id in (raw.id, said.id, submitted.id):
        job = workplace.ended(job_id)
        assert job.status is JobStatus.SUCCEEDED
        assert job.result is not None
        assert job.result.embedding == pytest.approx(mean)
        assert (job.result.text, job.result.usage.prompt_tokens, job.result.usage.completion_tokens) == ("", 5, 0)
    assert raw.get(timeout=10)["result"]["embedding"] == pytest.approx(mean)
    generated = workplace.send(max_tokens=2)
    assert "embedding" not in generated.get(timeout=10)["result"]


def test_a_second_delivery_is_dropped(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    worker = start_worker(step_s=0.02)
    sent = workplace.send(max_tokens=40)
    workplace.running(sent.id)
    workplace.send(task_id=sent.id, max_tokens=40)  # while it runs
    eventually(lambda: workplace.queued_messages() == 0, 5, "the second message is taken")
    first = sent.get(timeout=10)
    workplace.send(task_id=sent.id, max_tokens=40)  # after it has ended
    eventually(lambda: workplace.queued_messages() == 0 and workplace.unacked() == 0, 5, "every message is settled")
    job = workplace.job(sent.id)
    assert job.attempt == 1
    assert sent.get(timeout=1) == first
    assert workplace.pool_info(worker)["engine"]["generation_tokens"] == 40
    workplace.ledger.check()


def test_a_result_that_its_worker_could_not_store_is_stored_by_the_next_delivery(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker()
    sent = workplace.send(max_tokens=5)
    first = sent.get(timeout=10)
    failed = workplace.send(prompt="x" * 5000)
    eventually(lambda: failed.state == "FAILURE", 10, "the bad one has failed")
    for one in (sent, failed):
        workplace.redis.delete(f"celery-task-meta-{one.id}")
        workplace.send(task_id=one.id, max_tokens=5)
    assert sent.get(timeout=10) == first
    eventually(lambda: failed.state == "FAILURE", 10, "the failure is told again")


def test_the_stream_tells_the_whole_story(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    start_worker()
    with workplace.redis.pubsub() as done:
        done.subscribe(DONE_CHANNEL)
        sent = workplace.send(max_tokens=16)
        quiet = workplace.send(max_tokens=16, stream=False)
        sent.get(timeout=10)
        quiet.get(timeout=10)
        told = eventually_messages(done, 2)
    assert told == {sent.id, quiet.id}
    events = read_stream(workplace, sent.id)
    assert [event.status for event in events if event.event == "state"] == [JobStatus.RUNNING, JobStatus.SUCCEEDED]
    tokens = [event for event in events if event.event == "token"]
    text = ""
    for event in tokens:
        assert event.offset == len(text)
        assert event.attempt == 1
        text += event.text
    job = workplace.job(sent.id)
    assert job.result is not None
    assert text == job.result.text
    assert [i for event in tokens for i in event.token_ids] == job.result.token_ids
    assert 0 < workplace.redis.ttl(stream_key(sent.id)) <= STREAM_TTL_S
    assert [event.event for event in read_stream(workplace, quiet.id)] == ["state", "state"]


def test_events_and_celery_results_are_kept_for_as_long_as_is_set(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker(RETENTION__EVENTS_HOURS=0.1)
    sent = workplace.send(max_tokens=3)
    sent.get(timeout=10)
    eventually(lambda: workplace.unacked() == 0, 10, "everything is told")
    keys = (stream_key(sent.id), workplace.app.backend.get_key_for_task(sent.id))
    assert all(300 < workplace.redis.ttl(key) <= 360 for key in keys)


def test_inspect_shows_the_pool_and_no_prompt(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    worker = start_worker(step_s=0.02)
    sent = workplace.send(prompt="a secret of mine", max_tokens=100)
    workplace.running(sent.id)
    info = workplace.pool_info(worker)
    assert info["implementation"] == "worker.pool:EnginePool"
    assert info["max-concurrency"] == 64
    assert info["model"] == MODEL
    assert info["device"] == "fake"
    assert info["ledger"] == "available"
    assert info["engine"]["running"] == 1
    assert info["engine"]["pages_free"] < info["engine"]["pages_total"]
    active = workplace.app.control.inspect([worker.node]).active()[worker.node]
    assert [task["id"] for task in active] == [sent.id]
    assert "secret" not in json.dumps(active)
    sent.get(timeout=10)
    assert sent.id not in worker.log, "the ledger and the events tell of each job"
    assert "secret" not in worker.log


def test_the_worker_shows_that_it_consumes_until_it_leaves(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    """flower 1128."""
    worker = start_worker()
    seen = json.loads(workplace.redis.get(worker_key(worker.node)) or b"{}")
    assert seen["model"] == MODEL
    assert abs((utc_now() - datetime.fromisoformat(seen["at"])).total_seconds()) < 20
    assert 0 < workplace.redis.ttl(worker_key(worker.node)) <= WORKER_KEY_TTL_S
    assert worker.stop() == 0
    assert workplace.redis.get(worker_key(worker.node)) is None


def test_events_tell_the_summary_and_no_prompt(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker(step_s=0.02)
    events: list[dict[str, Any]] = []
    with workplace.app.connection_for_read() as connection:
        receiver = workplace.app.events.Receiver(connection, handlers={"*": events.append})
        with receiver.consumer_context() as (draining, _, _):
            with suppress(TimeoutError):
                draining.drain_events(timeout=0.1)  # subscribes
            done = workplace.send(prompt="a secret of mine", max_tokens=20)
            stopped = workplace.send(prompt="a secret of mine", max_tokens=3000)
            workplace.running(stopped.id)
            workplace.app.control.revoke(stopped.id, terminate=True)
            refused = workplace.send(prompt="a secret of mine", options={"countdown": 3600})

            def heard(kind: str, task_id: str) -> list[dict[str, Any]]:
                with suppress(TimeoutError):
                    draining.drain_events(timeout=0.1)
                return heard_of(events, task_id, kind)

            [success] = eventually(lambda: heard("task-succeeded", done.id))
            [revoked] = eventually(lambda: heard("task-revoked", stopped.id))
            [failure] = eventually(lambda: heard("task-failed", refused.id))
    assert success["result"].startswith("20 tokens · length · ")
    assert revoked["terminated"] is True
    assert failure["exception"].startswith("JobFailed('invalid_request: ")
    assert len(heard_of(events, done.id, "task-started")) == 1
    assert heard_of(events, refused.id, "task-received")[0]["kwargs"] == f"job {refused.id}"
    of_the_worker = [event for event in events if event["type"] != "task-sent"]
    assert "secret" not in json.dumps(of_the_worker)


def test_growing_and_shrinking_moves_the_cap(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    worker = start_worker(step_s=0.01)
    control = workplace.app.control
    control.pool_shrink(60, destination=[worker.node], reply=True)
    assert workplace.pool_info(worker)["max-concurrency"] == 4
    sent = [workplace.send(max_tokens=30) for _ in range(12)]
    for result in sent:
        result.get(timeout=15)
    assert max(job.timings.max_batch_size or 0 for job in map(workplace.job, [s.id for s in sent]) if job.timings) == 4
    control.pool_grow(1000, destination=[worker.node], reply=True)
    assert workplace.pool_info(worker)["max-concurrency"] == 64


def test_metrics_are_served(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        worker = start_worker(WORKER__METRICS_PORT=taken.getsockname()[1])
        workplace.send(max_tokens=16).get(timeout=10)
        with urllib.request.urlopen(worker.metrics_url, timeout=5) as answer:
            text = answer.read().decode()
    assert 'headrace_jobs_ended_total{model="fake",reason="",status="succeeded"} 1.0' in text
    assert 'headrace_generation_tokens_total{model="fake"} 16.0' in text
    assert 'headrace_queue_seconds_count{model="fake"} 1.0' in text
    assert 'headrace_engine_running{model="fake"} 0.0' in text


def heard_of(events: list[dict[str, Any]], task_id: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("uuid") == task_id and event["type"] == kind]


def eventually_messages(channel: redis.client.PubSub, count: int) -> set[str]:
    told: set[str] = set()

    def probe() -> bool:
        message = channel.get_message(ignore_subscribe_messages=True, timeout=0.1)
        if message is not None:
            told.update(message["data"].decode().split())
        return len(told) == count

    eventually(probe, 10, f"{count} jobs are announced")
    return told


def read_stream(workplace: Workplace, job_id: str) -> list[StateEvent | TokenEvent]:
    return [job_event.validate_json(fields[b"event"]) for _, fields in workplace.redis.xrange(stream_key(job_id))]


def test_a_producers_job_counts_as_accepted_when_it_was_sent(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    sent = workplace.send(max_tokens=3)
    late = workplace.send(max_tokens=3, ttl_s=0.5)
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began > 1.0, 3, "a second passes")
    start_worker()
    job = workplace.ended(sent.id)
    assert job.timings is not None
    assert (job.timings.queue_time_ms or 0) >= 1000
    assert (job.timings.total_time_ms or 0) >= 1000
    assert workplace.ended(late.id).status is JobStatus.EXPIRED
