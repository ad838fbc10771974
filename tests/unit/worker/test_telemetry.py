"""The telemetry thread against a real broker."""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable, Iterator

import pytest
import redis
from headrace.contract import JobStatus
from headrace.events import job_event
from headrace.wire import stream_key

from engine.request import TokenDelta
from tests.conftest import Broker
from tests.workers import eventually
from worker import telemetry as module
from worker.job_stream import Outgoing
from worker.metrics import Metrics
from worker.telemetry import Telemetry


def delta(job_id: str, n: int) -> TokenDelta:
    return TokenDelta(job_id, "x", n, (n,))


def events(client: redis.Redis, job_id: str) -> list[str]:
    """Each event of a job in a word: its status, or its offset."""
    found = [job_event.validate_json(entry[b"event"]) for _, entry in client.xrange(stream_key(job_id))]
    return [event.status.value if event.event == "state" else str(event.offset) for event in found]


@pytest.fixture
def client(broker: Broker) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(broker.url, socket_connect_timeout=1) as client:
        yield client


@pytest.fixture
def begin(client: redis.Redis) -> Iterator[Callable[[], Telemetry]]:
    made: list[Telemetry] = []

    def start() -> Telemetry:
        made.append(Telemetry(client, Metrics("fake")))
        made[-1].start()
        return made[-1]

    yield start
    for one in made:
        one.stop(2)


def test_events_keep_their_order(client: redis.Redis, begin: Callable[[], Telemetry]) -> None:
    telemetry = begin()
    telemetry.begin("a", 1, True, "r1")
    telemetry.begin("b", 1, False, "r1")
    for n in range(3):
        telemetry.tokens([delta("a", n), delta("b", n), delta("stranger", n)])
    telemetry.end("a", 1, JobStatus.SUCCEEDED)
    telemetry.end("b", 1, JobStatus.FAILED)
    telemetry.stop(5)
    assert events(client, "a") == ["running", "0", "1", "2", "succeeded"]
    assert events(client, "b") == ["running", "failed"]
    assert events(client, "stranger") == []


@pytest.mark.parametrize("ends", ["succeeded", "handed back", "lost"])
def test_text_held_back_until_the_attempt_ended_is_told_only_if_the_job_ended_too(
    client: redis.Redis, begin: Callable[[], Telemetry], ends: str
) -> None:
    telemetry = begin()
    telemetry.begin("a", 1, True, "r1")
    telemetry.tokens([delta("a", 0)])
    telemetry.tokens([TokenDelta("a", "half a stop string", 1, ())])
    if ends == "lost":
        telemetry.drop("a")
    else:
        telemetry.end("a", 1, JobStatus.SUCCEEDED if ends == "succeeded" else JobStatus.QUEUED)
    telemetry.begin("a", 2, True, "r1")
    telemetry.end("a", 2, JobStatus.SUCCEEDED)
    telemetry.stop(5)
    first = {"succeeded": ["1", "succeeded"], "handed back": ["queued"], "lost": []}[ends]
    assert events(client, "a") == ["running", "0", *first, "running", "succeeded"]


def test_each_completion_has_its_own_offsets_and_its_own_end(
    client: redis.Redis, begin: Callable[[], Telemetry]
) -> None:
    telemetry = begin()
    telemetry.begin("a", 1, True, "r1")
    telemetry.tokens([delta("a", 0), TokenDelta("a", "y", 0, (7,), 1)])
    telemetry.tokens([TokenDelta("a", "held", 1, (), 0), TokenDelta("a", "too", 1, (), 1)])
    telemetry.end("a", 1, JobStatus.SUCCEEDED)
    telemetry.stop(5)
    found = [job_event.validate_json(entry[b"event"]) for _, entry in client.xrange(stream_key("a"))]
    told = [(event.index, event.offset, event.text) for event in found if event.event == "token"]
    assert told == [(0, 0, "x"), (1, 0, "y"), (0, 1, "held"), (1, 1, "too")]


def test_tokens_are_dropped_and_states_are_kept_while_redis_is_away(
    broker: Broker, client: redis.Redis, begin: Callable[[], Telemetry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 10)
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    telemetry = begin()
    telemetry.begin("a", 1, True, "r1")
    eventually(lambda: events(client, "a") == ["running"], 5)
    broker.kill(signal.SIGTERM)
    for n in range(500):
        telemetry.tokens([delta("a", n)])
    telemetry.end("a", 1, JobStatus.SUCCEEDED)
    stored: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    telemetry.result(lambda out: out.result("result", "here", 60, False), stored.put)
    broker.start()
    assert stored.get(timeout=10) is None
    assert client.get("result") == b"here"
    told = events(client, "a")
    assert told[0] == "running"
    assert told[-1] == "succeeded"
    assert 0 < len(told) < 300


def test_a_result_that_can_not_be_stored_holds_up_nobody(client: redis.Redis, begin: Callable[[], Telemetry]) -> None:
    telemetry = begin()
    done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def broken(_: Outgoing) -> None:
        raise TypeError("no JSON")

    telemetry.result(broken, done.put)
    assert done.get(timeout=5) is None
    client.set(stream_key("a"), "not a stream")
    telemetry.begin("a", 1, True, "r1")
    telemetry.begin("b", 1, True, "r1")
    eventually(lambda: events(client, "b") == ["running"], 5)
