"""The relay against a real broker and a real ledger."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from ledger import Ledger, dispatches, reconciler
from ledger import relay as relay_module
from ledger import transport as transport_module
from ledger.contract import LedgerUnavailable
from ledger.relay import Relay
from ledger.transport import BrokerAway, CeleryTransport


def wait_until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.02)


class Running:
    """Relays with transports of their own, stopped at the end."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.relays: list[Relay] = []
        self.transports: list[CeleryTransport] = []

    def start(self, url: str, owner: str = "r1", interval_s: float = 0.1) -> Relay:
        transport, view = CeleryTransport(url), CeleryTransport(url)
        relay = Relay(self.ledger, transport, owner, interval_s, view)
        relay.start()
        self.relays.append(relay)
        self.transports += [transport, view]
        return relay

    def stop(self) -> None:
        for relay in self.relays:
            relay.stop()
        for transport in self.transports:
            transport.close()


@pytest.fixture
def running(ledger: Ledger) -> Iterator[Running]:
    running = Running(ledger)
    yield running
    running.stop()


@pytest.fixture
def seen(broker_url: str) -> Iterator[CeleryTransport]:
    """A second transport, to look with."""
    transport = CeleryTransport(broker_url)
    yield transport
    transport.close()


def test_a_submitted_job_reaches_the_broker(running: Running, desk: Any, seen: Any, broker_url: str) -> None:
    running.start(broker_url)
    job_id = desk.queued()
    wait_until(lambda: seen.held(["m"]) == {job_id})
    wait_until(lambda: desk.topics(job_id) == [])


def test_waking_sends_at_once(running: Running, desk: Any, seen: Any, broker_url: str) -> None:
    relay = running.start(broker_url, interval_s=60)
    wait_until(lambda: relay._sending.due_s > 0)
    job_id = desk.queued()
    relay.wake()
    wait_until(lambda: seen.held(["m"]) == {job_id}, within_s=3)


def test_two_relays_send_each_message_once(running: Running, desk: Any, seen: Any, broker_url: str) -> None:
    for owner in ("r1", "r2"):
        running.start(broker_url, owner, interval_s=0.01)
    ids = {desk.queued() for _ in range(50)}
    wait_until(lambda: seen.held(["m"]) == ids)
    assert seen.depth(["m"]) == 50


def test_a_cancellation_is_sent_as_a_revocation(running: Running, desk: Any, ledger: Ledger, broker_url: str) -> None:
    lease = desk.running()
    ledger.request_cancel([lease.job_id])
    with redis.Redis.from_url(broker_url) as client, client.pubsub() as pubsub:
        pubsub.psubscribe("*celery.pidbox*")
        pubsub.get_message(timeout=1)
        running.start(broker_url)
        wait_until(lambda: pubsub.get_message(ignore_subscribe_messages=True, timeout=0.1) is not None)
    wait_until(lambda: desk.topics(lease.job_id) == [])


def test_a_cancellation_does_not_wait_for_what_is_looked_through(
    running: Running, desk: Any, ledger: Ledger, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With very many jobs it takes long to find what is to be raised, published again, or forgotten."""
    looking, over = threading.Event(), threading.Event()

    def look(*_: Any) -> int:
        looking.set()
        assert over.wait(10)
        return 0

    monkeypatch.setattr(ledger, "raise_aged", look)
    relay = running.start(broker_url)
    assert looking.wait(10)
    lease = desk.running()
    ledger.request_cancel([lease.job_id])
    relay.wake()
    wait_until(lambda: desk.topics(lease.job_id) == [], within_s=5)
    over.set()


def test_it_reaps_and_publishes_what_it_reaped(
    running: Running, desk: Any, ledger: Ledger, seen: Any, broker_url: str
) -> None:
    lease = desk.running(lease_s=-1)
    ledger.sent([row.id for row in ledger.outbox(10)])
    running.start(broker_url)
    wait_until(lambda: seen.held(["m"]) == {lease.job_id})


def test_what_is_overdue_is_reaped_while_the_elected_one_is_dead(
    running: Running, desk: Any, ledger: Ledger, seen: Any, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "TEND_S", 0.1)
    assert ledger.elect(relay_module.ROLE, "a relay that dies now", 60)
    lease = desk.running(lease_s=-1)
    ledger.sent([row.id for row in ledger.outbox(10)])
    running.start(broker_url)
    wait_until(lambda: seen.held(["m"]) == {lease.job_id})
    assert not ledger.elect(relay_module.ROLE, "r1", 60), "nobody was elected for it"


def test_a_flushed_broker_is_filled_again_within_seconds(
    running: Running, desk: Any, seen: Any, broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "TEND_S", 0.2)
    monkeypatch.setattr(reconciler, "SETTLED_S", 0.2)
    own = CeleryTransport(broker.url)
    running.start(broker.url)
    ids = {desk.queued() for _ in range(20)}
    wait_until(lambda: own.held(["m"]) == ids)
    broker.flush()
    wait_until(lambda: own.held(["m"]) == ids)
    own.close()


def test_one_relay_is_elected_and_another_takes_over_at_once_when_it_stops(
    running: Running, sql: Any, broker_url: str
) -> None:
    def reaper() -> list[str]:
        return [row.owner for row in sql("SELECT owner FROM roles WHERE role = 'reaper'")]

    first = running.start(broker_url, "r1")
    wait_until(lambda: reaper() == ["r1"])
    running.start(broker_url, "r2")
    time.sleep(0.3)
    assert reaper() == ["r1"]
    first.stop()
    wait_until(lambda: reaper() == ["r2"], within_s=3)


@pytest.mark.slow
def test_a_broker_that_is_away_costs_one_log_line_and_loses_nothing(
    running: Running, desk: Any, broker: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatches, "HOLD_S", 0.2)
    caplog.set_level(logging.INFO, "ledger.relay")
    relay = running.start(broker.url, interval_s=0.05)
    first = desk.queued()
    wait_until(lambda: desk.topics(first) == [])
    broker.kill(signal.SIGKILL)
    ids = {first} | {desk.queued() for _ in range(10)}
    for _ in range(20):
        relay.wake()
        time.sleep(0.1)
    assert sum("sending fails" in line for line in caplog.messages) == 1
    assert all(desk.topics(job_id) == ["publish"] for job_id in ids - {first})
    broker.start()
    own = CeleryTransport(broker.url)
    wait_until(lambda: ids - {first} <= own.held(["m"]))
    wait_until(lambda: sum("sending works again" in line for line in caplog.messages) == 1)
    own.close()


@pytest.mark.slow
def test_a_broker_that_hangs_does_not_keep_it_from_stopping(
    running: Running, desk: Any, broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "SOCKET_TIMEOUT_S", 0.3)
    relay = running.start(broker.url)
    broker.kill(signal.SIGSTOP)
    job_id = desk.queued()
    relay.wake()
    time.sleep(0.5)
    relay.stop(timeout_s=8)
    assert not any(thread.is_alive() for thread in relay._threads)
    broker.kill(signal.SIGCONT)
    assert desk.topics(job_id) == ["publish"]


def test_a_ledger_that_is_away_is_waited_for(
    ledger: Ledger,
    desk: Any,
    running: Running,
    seen: Any,
    broker_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job_id = desk.queued()
    take, calls = ledger.outbox, []

    def away_at_first(limit: int, windows: Any) -> Any:
        calls.append(limit)
        if len(calls) < 3:
            raise LedgerUnavailable("gone")
        return take(limit, windows)

    monkeypatch.setattr(ledger, "outbox", away_at_first)
    running.start(broker_url, interval_s=0.05)
    wait_until(lambda: seen.held(["m"]) == {job_id})
    assert sum("sending fails" in line for line in caplog.messages) == 1


def test_rows_stay_if_sending_fails_half_way(ledger: Ledger, desk: Any) -> None:
    class Refusing:
        def ping(self) -> None: ...

        def publish(self, dispatches: Any) -> None: ...

        def revoke(self, dispatches: Any) -> None:
            raise BrokerAway("no")

    lease, waiting = desk.running(), desk.queued()
    ledger.request_cancel([lease.job_id])
    with pytest.raises(BrokerAway):
        Relay(ledger, Refusing(), "r").drain()
    assert desk.topics(lease.job_id) == ["revoke"]
    assert desk.topics(waiting) == ["publish"]
