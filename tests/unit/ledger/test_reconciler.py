"""Lost messages are found by comparing a real ledger with a real broker."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from headrace.wire import SILENT_S, queue_name

from ledger import Ledger, reconciler
from ledger.reconciler import Reconciler
from ledger.relay import Relay
from ledger.transport import CeleryTransport

NORMAL = f"{queue_name('m')}\x06\x163"


class Counting(CeleryTransport):
    """The real transport, counting the full comparisons."""

    surveys = 0

    def held(self, models: Any) -> set[str]:
        self.surveys += 1
        return super().held(models)


@pytest.fixture
def transport(broker_url: str) -> Iterator[Counting]:
    transport = Counting(broker_url)
    yield transport
    transport.close()


@pytest.fixture
def client(broker_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(broker_url) as client:
        yield client


@pytest.fixture
def relay(ledger: Ledger, transport: Counting, monkeypatch: pytest.MonkeyPatch) -> Relay:
    """Not started: the tests drain by hand. Jobs are looked for at once."""
    monkeypatch.setattr(reconciler, "SETTLED_S", -1.0)
    return Relay(ledger, transport, "r")


def hold(client: Any, score: float) -> None:
    message = json.loads(client.rpop(NORMAL))
    tag = message["properties"]["delivery_tag"]
    client.zadd("unacked_index", {tag: score})
    client.hset("unacked", tag, json.dumps([message, "", NORMAL]))


def test_nothing_is_done_when_nothing_is_missing(ledger: Ledger, desk: Any, transport: Counting, relay: Relay) -> None:
    rounds = Reconciler(ledger, transport)
    assert rounds.round() == 0
    for priority in ("high", "normal", "low"):
        desk.queued(priority=priority)
    desk.queued(model="other")
    assert rounds.round() == 0
    relay.drain()
    for _ in range(5):
        assert rounds.round() == 0
    assert transport.surveys == 1, "counts suffice after the first survey"


def test_what_is_missing_twice_is_published_again(
    ledger: Ledger, desk: Any, transport: Counting, client: Any, relay: Relay
) -> None:
    """kombu 305, 1836: a message lost between BRPOP and `unacked`."""
    lost, kept = desk.queued(), desk.queued()
    relay.drain()
    rounds = Reconciler(ledger, transport)
    assert rounds.round() == 0
    client.rpop(NORMAL)
    assert [rounds.round(), rounds.round(), rounds.round()] == [0, 1, 0]
    assert desk.topics(lost) == ["publish"]
    assert desk.topics(kept) == []
    relay.drain()
    assert transport.held(["m"]) == {lost, kept}
    assert [rounds.round(), rounds.round()] == [0, 0]


def test_a_flushed_broker_is_filled_again(
    ledger: Ledger, desk: Any, transport: Counting, client: Any, relay: Relay
) -> None:
    ids = {desk.queued(model=model) for model in ("m", "m", "n")}
    desk.running()
    relay.drain()
    rounds = Reconciler(ledger, transport)
    rounds.round()
    client.flushall()
    assert [rounds.round(), rounds.round()] == [0, 3]
    relay.drain()
    assert transport.held(["m", "n"]) == ids


def test_what_a_live_worker_holds_is_not_missing_but_a_dead_ones_is(
    ledger: Ledger, desk: Any, transport: Counting, client: Any, relay: Relay
) -> None:
    desk.queued(), desk.queued()
    relay.drain()
    rounds = Reconciler(ledger, transport)
    hold(client, time.time())
    hold(client, time.time() - SILENT_S - 1)
    assert [rounds.round(), rounds.round()] == [0, 1]


def test_running_and_ended_jobs_are_not_missed(
    ledger: Ledger, desk: Any, transport: Counting, client: Any, relay: Relay
) -> None:
    desk.running(), desk.succeeded()
    relay.drain()
    client.flushall()
    rounds = Reconciler(ledger, transport)
    assert [rounds.round() for _ in range(3)] == [0, 0, 0]


def test_a_loss_behind_equal_counts_is_found_by_the_next_survey(
    ledger: Ledger, desk: Any, transport: Counting, client: Any, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A raw message in the queue makes up for the lost one in number."""
    desk.queued()
    relay.drain()
    rounds = Reconciler(ledger, transport)
    rounds.round()
    client.lset(NORMAL, 0, json.dumps({"headers": {"id": "raw"}}))
    assert [rounds.round() for _ in range(3)] == [0, 0, 0]
    monkeypatch.setattr(reconciler, "SURVEY_S", 0.0)
    monkeypatch.setattr(reconciler, "SURVEY_SHARE", float("inf"))
    again = Reconciler(ledger, transport)
    assert [again.round(), again.round()] == [0, 1]


def test_a_job_that_is_claimed_between_two_looks_is_left_alone(
    ledger: Ledger, desk: Any, transport: Counting, client: Any, relay: Relay
) -> None:
    job_id = desk.queued()
    relay.drain()
    client.flushall()
    rounds = Reconciler(ledger, transport)
    assert rounds.round() == 0
    desk.claimed(job_id)
    assert rounds.round() == 0
    assert desk.topics(job_id) == []


def test_a_job_that_has_just_come_is_not_looked_for(
    ledger: Ledger, desk: Any, transport: Counting, client: Any, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "SETTLED_S", 60.0)
    desk.queued()
    relay.drain()
    client.flushall()
    rounds = Reconciler(ledger, transport)
    assert [rounds.round() for _ in range(3)] == [0, 0, 0]
