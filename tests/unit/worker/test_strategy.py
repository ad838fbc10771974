"""Jobs that go past Celery's machinery are told of, counted and ended as it would."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import signals
from celery.worker import state
from celery.worker import strategy as celery_strategy
from celery.worker.request import Request
from headrace.contract import Priority
from headrace.publication import JobMessage as Publication
from headrace.publication import composed

from worker.app import app
from worker.envelope import JobMessage as Message
from worker.failures import JobFailed, Revoked
from worker.strategy import strategy
from worker.trace import is_heard, trace

TASK = "headrace.generate"


class Pool:
    """Notes by which way a job comes in."""

    def __init__(self) -> None:
        self.ways: list[str] = []

    def take(self, message: Any, trace: Any) -> None:
        self.ways.append("ours")

    def apply_async(self, target: Any, **options: Any) -> None:
        self.ways.append("Celery's")


class Events:
    enabled = True

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append((kind, fields))


class Consumer:
    """As much of Celery's as a strategy looks at."""

    hostname = "w@test"
    connection_errors = ()
    disable_rate_limits = False
    timer = SimpleNamespace(call_at=None)
    apply_eta_task = _limit_task = _limit_post_eta = None

    def __init__(self) -> None:
        self.pool = Pool()
        self.event_dispatcher = Events()
        self.task_buckets: dict[str, Any] = {TASK: None}
        self.controller = SimpleNamespace(state=state)

    def on_task_request(self, request: Any) -> None:
        request.execute_using_pool(self.pool)


@pytest.fixture
def consumer() -> Iterator[Consumer]:
    app.loader.import_default_modules()
    yield Consumer()
    state.reset_state()


def message_of(job_id: str = "a", embed: dict[str, Any] | None = None, **headers: Any) -> Any:
    asked = Publication(job_id, "m", Priority.NORMAL, {"job_id": job_id})
    payload, _ = composed(app, job_id, asked.options(None), "nobody")
    payload["headers"] |= headers
    channel = SimpleNamespace(decode_body=lambda body, _: b64decode(body))
    made = Message({**payload, "body": payload["body"].decode()}, channel=channel)
    if embed is not None:
        made.payload[2].update(embed)
    return made


def receive(consumer: Consumer, made: Any, by: Callable[..., Any] = strategy) -> Any:
    by(app.tasks[TASK], app, consumer)(made, None, made.ack_log_error, made.reject_log_error, [])
    return state.requests[made.headers["id"]]


def test_a_job_is_announced_as_celery_announces_it(consumer: Consumer) -> None:
    by_celery = Consumer()
    receive(by_celery, message_of(), celery_strategy.default)
    request = receive(consumer, message_of())
    assert consumer.event_dispatcher.sent == by_celery.event_dispatcher.sent
    assert [kind for kind, _ in consumer.event_dispatcher.sent] == ["task-received"]
    assert request in state.reserved_requests
    assert (consumer.pool.ways, by_celery.pool.ways) == (["ours"], ["Celery's"])


@pytest.mark.parametrize("name", ["callbacks", "errbacks", "chain", "chord"])
def test_what_follows_a_job_is_celerys(consumer: Consumer, name: str) -> None:
    receive(consumer, message_of(embed={name: [{"task": "x"}]}))
    assert consumer.pool.ways == ["Celery's"]


@pytest.mark.parametrize("name", ["task_prerun", "task_postrun", "task_success", "task_failure"])
def test_tools_that_listen_are_told_by_celery(consumer: Consumer, name: str) -> None:
    def listen(**_: Any) -> None: ...

    signal = getattr(signals, name)
    assert not is_heard()
    signal.connect(listen)
    try:
        receive(consumer, message_of())
    finally:
        signal.disconnect(listen)
    receive(consumer, message_of())
    assert consumer.pool.ways == ["Celery's", "ours"]


def test_a_task_of_somebody_elses_is_celerys(consumer: Consumer) -> None:
    @app.task(name="theirs")  # type: ignore[untyped-decorator]  # Celery has no types
    def other() -> None: ...

    try:
        handler = strategy(other, app, consumer)
    finally:
        del app.tasks["theirs"]
    assert handler.__module__ == "celery.worker.strategy"


def test_a_rate_limit_is_kept(consumer: Consumer) -> None:
    limited: list[Any] = []
    consumer.task_buckets[TASK] = "a bucket"
    consumer._limit_task = lambda request, bucket, tokens: limited.append(bucket)  # type: ignore[assignment]
    made = message_of()
    strategy(app.tasks[TASK], app, consumer)(made, None, made.ack_log_error, made.reject_log_error, [])
    assert (limited, consumer.pool.ways) == (["a bucket"], [])


def test_a_revocation_is_noted(consumer: Consumer) -> None:
    state.revoked.add("a")
    assert receive(consumer, message_of("a")).revocation.reason == "revoked"
    assert receive(consumer, message_of("b")).revocation is None
    expired = receive(consumer, message_of("c", expires="2020-01-01T00:00:00+00:00"))
    assert expired.revocation.expired


def test_a_success_is_told_and_acknowledged(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    acknowledged: list[Any] = []
    monkeypatch.setattr(Request, "acknowledge", lambda one: acknowledged.append(one))
    request = receive(consumer, message_of())
    request.on_accepted(1, 0.0)
    request.on_success((False, "3 tokens", 0.5))
    assert consumer.event_dispatcher.sent[-1] == ("task-succeeded", {"uuid": "a", "result": "3 tokens", "runtime": 0.5})
    assert acknowledged == [request]
    assert request not in state.active_requests
    assert "a" not in state.requests


@pytest.mark.parametrize("failure", [JobFailed("engine_error: why"), Revoked("revoked")])
def test_how_a_job_failed_is_handed_on(failure: Exception) -> None:
    def run(*_: Any) -> None:
        raise failure

    message = SimpleNamespace(args=[], kwargs={}, task=SimpleNamespace(run=run))
    failed, info, _ = trace(SimpleNamespace(message=message))  # type: ignore[arg-type]
    assert failed
    assert getattr(info.exception, "exc", info.exception) is failure


def test_a_body_is_read_as_kombu_reads_it() -> None:
    def read(body: bytes) -> Any:
        return Message({"body": body, "content-type": "application/json", "content-encoding": "utf-8", "headers": {},
                        "properties": {"delivery_tag": "t", "delivery_info": {"exchange": "", "routing_key": "q"}}},
                       channel=SimpleNamespace(decode_body=lambda body, _: body)).payload  # fmt: skip

    assert read(b'[[], {"x": [1.5, null, "\\u00e4"]}, {}]') == [[], {"x": [1.5, None, "ä"]}, {}]
    assert read(b'[[], {"x": "\\ud800"}, {}]') == [[], {"x": "\ud800"}, {}], "what only the standard library takes"
    marked = (
        b'[[], {"x": {"__type__": "uuid", "__value__": {"hex": "00000000000070008000000000000000", "version": 4}}}, {}]'
    )
    assert str(read(marked)[1]["x"]).startswith("0000")
