"""Jobs straight into Celery, on a real broker."""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import celery
import pytest
import redis
from celery.signals import before_task_publish
from headrace import (
    BadRequest,
    ConnectionFailed,
    Job,
    JobFailed,
    JobStatus,
    JobTimeout,
    Priority,
    Producer,
    TooManyRequests,
)
from headrace.contract import JobError, JobRequest, JobResult, Reason
from headrace.outcome import celery_outcome
from headrace.wire import celery_config, queue_name, worker_key

from tests.conftest import Broker, free_port

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")


class Queue:
    """Reads what arrives on a model's queue, and stores outcomes as a worker does."""

    def __init__(self, broker_url: str) -> None:
        self.app = celery.Celery(set_as_current=False)
        self.app.conf.update(celery_config(broker_url))

    def take(self, model: str = "m") -> Any:
        with self.app.connection_for_read() as connection, connection.SimpleQueue(queue_name(model)) as queue:
            message = queue.get(timeout=5)
            message.ack()
            return message

    def end(self, job_id: str, status: JobStatus = JobStatus.SUCCEEDED) -> None:
        good = status is JobStatus.SUCCEEDED
        job = Job(
            id=job_id, model="m", status=status, priority=Priority.NORMAL, tenant="t", created_at=datetime.now(UTC),
            result=JobResult(text="out"), error=None if good else JobError(code=Reason.CANCELLED, message="asked"),
        )  # fmt: skip
        state, result = celery_outcome(job)
        self.app.backend.store_result(job_id, result, state)

    def close(self) -> None:
        self.app.backend.client.close()
        self.app.close()


@pytest.fixture
def queue(broker_url: str) -> Iterator[Queue]:
    made = Queue(broker_url)
    yield made
    made.close()


@pytest.fixture
def producer(broker_url: str) -> Iterator[Producer]:
    with Producer(broker_url) as made:
        yield made


def test_the_message_is_the_contract(producer: Producer, queue: Queue) -> None:
    job_id = producer.submit("secret", model="m", max_tokens=3, priority="high")
    message = queue.take()
    assert message.headers["task"] == "headrace.generate"
    assert message.headers["id"] == job_id
    assert message.payload[1] == {"model": "m", "prompt": "secret", "max_tokens": 3, "priority": "high"}
    assert message.properties["priority"] == 0
    assert "secret" not in str(message.headers)


def test_many_jobs_are_the_same_messages_as_one_each(producer: Producer, queue: Queue) -> None:
    requests = [
        JobRequest(model="m", prompt=f"p{n}", idempotency_key="k" if n == 1 else None, metadata={}) for n in range(300)
    ]
    job_ids = producer.submit_many(requests)
    assert job_ids[1] == producer.submit("p1", model="m", idempotency_key="k")
    taken = [queue.take() for _ in requests]
    assert [message.headers["id"] for message in taken] == job_ids
    assert [message.payload[1]["prompt"] for message in taken] == [f"p{n}" for n in range(300)]
    assert {message.properties["priority"] for message in taken} == {3}


def test_many_jobs_are_written_as_celery_writes_them(producer: Producer, queue: Queue) -> None:
    def seen(message: Any) -> list[Any]:
        properties = {name: value for name, value in message.properties.items() if name != "delivery_tag"}
        named = [message.headers, properties, message.payload, message.content_type, message.content_encoding]
        return [json.loads(json.dumps(part).replace(message.headers["id"], "ID")) for part in named]

    fields: dict[str, Any] = {"prompt": "ünï\x00", "model": "m", "priority": "low", "logit_bias": {"3": 1.5}}
    producer.submit_many([JobRequest(**fields)])
    producer.submit(**fields)
    many, one = seen(queue.take()), seen(queue.take())
    # Celery leaves what it was told of the arguments in a place where nobody looks for it.
    assert {one[1].pop("argsrepr"), one[1].pop("kwargsrepr")} == {"-", "job ID"}
    assert many == one


def test_flower_hears_of_many_jobs_at_once(producer: Producer, queue: Queue) -> None:
    heard: list[Any] = []
    with queue.app.connection_for_read() as connection:
        receiver = queue.app.events.Receiver(connection, handlers={"task-sent": heard.append})
        with receiver.consumer_context(wakeup=False) as (draining, _, _):
            with contextlib.suppress(TimeoutError):  # it subscribes as it begins to read
                draining.drain_events(timeout=0.1)
            job_ids = producer.submit_many([JobRequest(model="m", prompt="secret") for _ in range(3)])
            while len(heard) < len(job_ids):
                draining.drain_events(timeout=5)
    assert [event["uuid"] for event in heard] == job_ids
    assert {(event["queue"], event["kwargs"]) for event in heard} == {("headrace.m", f"job {i}") for i in job_ids}
    assert "secret" not in str(heard)


def test_who_traces_publications_hears_of_each_of_many(producer: Producer, queue: Queue) -> None:
    heard: list[str] = []

    def note(headers: dict[str, Any], **_: Any) -> None:
        headers["traceparent"] = f"trace of {headers['id']}"
        heard.append(headers["id"])

    before_task_publish.connect(note)
    try:
        job_ids = producer.submit_many([JobRequest(model="m", prompt=f"p{n}") for n in range(2)])
    finally:
        before_task_publish.disconnect(note)
    assert heard == job_ids
    assert [queue.take().headers["traceparent"] for _ in job_ids] == [f"trace of {job_id}" for job_id in job_ids]


def test_a_time_to_live_counts_from_the_submission(producer: Producer, queue: Queue) -> None:
    producer.submit("x", model="m", ttl_s=60)
    fields = queue.take().payload[1]
    assert "ttl_s" not in fields
    left_s = (datetime.fromisoformat(fields["deadline"]) - datetime.now(UTC)).total_seconds()
    assert 50 < left_s <= 60


def test_ids_follow_from_the_idempotency_key(producer: Producer) -> None:
    def submit(key: str | None, tenant: str = "t") -> str:
        return producer.submit("x", model="m", idempotency_key=key, tenant=tenant)

    assert submit("k") == submit("k")
    assert len({submit("k"), submit("l"), submit("k", "u"), submit(None), submit(None)}) == 5


def test_a_given_id_is_kept_and_checked(producer: Producer, queue: Queue) -> None:
    assert producer.submit("x", model="m", job_id="order-1") == "order-1"
    assert queue.take().headers["id"] == "order-1"
    with pytest.raises(BadRequest) as caught:
        producer.submit("x", model="m", job_id="a b")
    assert caught.value.param == "job_id"


def test_a_wrong_request_is_refused_at_the_producers_side(producer: Producer) -> None:
    """Learned from llm-d-async 353: a malformed job failed in the worker's log alone."""
    with pytest.raises(BadRequest) as caught:
        producer.submit("x", model="m", temperature=-1)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize("status", [s for s in JobStatus if s.terminal])
def test_wait_gives_the_job_however_it_ended(producer: Producer, queue: Queue, status: JobStatus) -> None:
    job_id = producer.submit("x", model="m")
    timer = threading.Timer(0.2, queue.end, [job_id, status])
    timer.start()
    began_s = time.monotonic()
    job = producer.wait(job_id, timeout=10)
    timer.join()
    assert (job.id, job.status) == (job_id, status)
    assert time.monotonic() - began_s < 2


def test_wait_for_what_ended_long_ago(producer: Producer, queue: Queue) -> None:
    queue.end("j")
    assert producer.wait("j", timeout=0).status is JobStatus.SUCCEEDED


def test_who_waits_for_what_has_ended_does_not_listen_first(
    producer: Producer, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.end("a")
    monkeypatch.setattr(producer._redis, "pubsub", lambda **_: pytest.fail("it listens"))
    assert producer.wait("a", timeout=5).status is JobStatus.SUCCEEDED


def test_wait_that_is_too_short(producer: Producer) -> None:
    with pytest.raises(JobTimeout):
        producer.wait("j", timeout=0.2)


def test_run_raises_for_an_end_without_success(producer: Producer, queue: Queue) -> None:
    def end_it() -> None:
        queue.end(queue.take().headers["id"], JobStatus.FAILED)

    worker = threading.Thread(target=end_it)
    worker.start()
    with pytest.raises(JobFailed):
        producer.run("x", model="m", timeout=10)
    worker.join()


def test_cancel_reaches_the_workers(producer: Producer, queue: Queue) -> None:
    heard: list[dict[str, Any]] = []

    def drain(connection: Any) -> None:
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.2)

    with queue.app.connection_for_read() as connection:
        mailbox = queue.app.control.mailbox(connection)
        handlers = {"revoke": lambda _, **told: heard.append(told)}
        node = mailbox.Node("w1@here", state=object(), handlers=handlers, channel=connection.channel())
        with node.listen():
            drain(connection)
            producer.cancel("j")
            until_s = time.monotonic() + 5
            while not heard and time.monotonic() < until_s:
                drain(connection)
    assert [(told["task_id"], told["terminate"]) for told in heard] == [("j", True)]


def test_without_a_broker_everything_ends_soon_and_says_so() -> None:
    with Producer(f"redis://127.0.0.1:{free_port()}/0") as producer:
        for attempt in (
            lambda: producer.submit("x", model="m"),
            lambda: producer.cancel("j"),
            lambda: producer.wait("j", timeout=1),
        ):
            began_s = time.monotonic()
            with pytest.raises(ConnectionFailed, match="the broker does not answer"):
                attempt()
            assert time.monotonic() - began_s < 8


def test_wait_survives_a_broker_that_goes_and_comes_back(broker: Broker) -> None:
    queue = Queue(broker.url)
    with Producer(broker.url) as producer:
        found: list[Job] = []
        waiting = threading.Thread(target=lambda: found.append(producer.wait("j", timeout=30)))
        waiting.start()
        time.sleep(0.3)
        broker.kill()
        time.sleep(0.5)
        broker.start()
        queue.end("j")
        waiting.join(30)
    queue.close()
    assert [job.status for job in found] == [JobStatus.SUCCEEDED]


def test_the_broker_is_left_clean_by_submissions_that_nobody_waits_for(producer: Producer, broker_url: str) -> None:
    """Learned from celery 3808: a producer that never reads results must not pile up subscriptions."""
    for _ in range(20):
        producer.submit("x", model="m")
    with redis.Redis.from_url(broker_url) as client:
        assert client.pubsub_channels("celery-task-meta-*") == []


def test_a_producer_holds_back_while_the_queue_is_full(broker_url: str, queue: Queue) -> None:
    """Nobody can refuse what is on the broker already."""
    with Producer(broker_url, max_queued=2) as producer:
        for _ in range(2):
            producer.submit("x", model="m", priority=Priority.LOW)
        with pytest.raises(TooManyRequests, match="2 messages wait, of at most 2") as caught:
            producer.submit("x", model="m")
        assert caught.value.code == "queue_full"
        producer.submit("x", model="other")
        taker = threading.Timer(0.3, queue.take)
        taker.start()
        producer.submit("x", model="m", ttl_s=30)
        taker.join()


def test_a_job_that_nobody_takes_is_told_with_what_keeps_it(producer: Producer, broker_url: str) -> None:
    with pytest.raises(JobTimeout) as late:
        producer.run("x", model="mistyped", timeout=0.1)
    assert str(late.value).endswith("; no worker takes jobs for the model 'mistyped': `headrace doctor` tells more")
    assert str(pickle.loads(pickle.dumps(late.value))) == str(late.value)
    with redis.Redis.from_url(broker_url) as client:
        client.set(worker_key("w@here"), '{"model": "busy"}')
    with pytest.raises(JobTimeout, match=r"had not ended after 0\.1 s$"):
        producer.run("x", model="busy", timeout=0.1)
