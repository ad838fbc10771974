"""The relay as processes run it: killed half-way, and with its real intervals."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from headrace.contract import JobRequest, JobStatus

from ledger import Ledger
from ledger.contract import Claim
from ledger.relay import Relay
from ledger.transport import CeleryTransport


@pytest.fixture
def seen(broker_url: str) -> Iterator[CeleryTransport]:
    transport = CeleryTransport(broker_url)
    yield transport
    transport.close()


@pytest.fixture
def relay(ledger: Ledger, broker_url: str) -> Iterator[Relay]:
    """With the intervals of production."""
    transport, view = CeleryTransport(broker_url), CeleryTransport(broker_url)
    relay = Relay(ledger, transport, "here", broker=view)
    yield relay
    relay.stop()
    transport.close()
    view.close()


def took_s(condition: Callable[[], bool], within_s: float) -> float:
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < within_s, "it did not happen in time"
        time.sleep(0.05)
    return time.monotonic() - began_s


def submit(ledger: Ledger, count: int) -> set[str]:
    return {ledger.submit(JobRequest(model="m", prompt="x")).job.id for _ in range(count)}


RELAY = """
import sys, time
from ledger import Ledger, relay
from ledger.transport import CeleryTransport
relay._BATCH = 3
transport, view = CeleryTransport(sys.argv[2]), CeleryTransport(sys.argv[2])
relay.Relay(Ledger(sys.argv[1]), transport, "child", 0.01, view).start()
time.sleep(60)
"""


@pytest.mark.slow
def test_a_relay_that_is_killed_half_way_loses_nothing(
    ledger: Ledger, migrated_url: str, seen: CeleryTransport, broker_url: str, relay: Relay
) -> None:
    ids = submit(ledger, 120)
    child = subprocess.Popen([sys.executable, "-c", RELAY, migrated_url, broker_url])
    took_s(lambda: seen.depth(["m"]) > 0, 30)
    child.kill()
    child.wait()
    relay.start()
    took_s(lambda: seen.held(["m"]) == ids, 15)
    took_s(lambda: ledger.sent_counts() == {"m": {JobStatus.QUEUED: len(ids)}}, 10)


@pytest.mark.slow
def test_a_flushed_broker_is_filled_again_within_seconds(
    ledger: Ledger, seen: CeleryTransport, broker_url: str, relay: Relay
) -> None:
    relay.start()
    ids = submit(ledger, 50)
    relay.wake()
    took_s(lambda: seen.held(["m"]) == ids, 10)
    with redis.Redis.from_url(broker_url) as client:
        client.flushall()
    assert took_s(lambda: seen.held(["m"]) == ids, 20) < 8
    assert seen.depth(["m"]) == len(ids)


@pytest.mark.slow
def test_a_dead_workers_job_is_back_in_the_queue_a_lease_time_later(
    ledger: Ledger, seen: CeleryTransport, relay: Relay, broker_url: str
) -> None:
    [job_id] = submit(ledger, 1)
    relay.start()
    took_s(lambda: seen.held(["m"]) == {job_id}, 10)
    with redis.Redis.from_url(broker_url) as client:
        client.flushall()
    claim: Any = ledger.claim([Claim(job_id)], "dead", 1.0)[0]
    assert claim.lease is not None
    assert took_s(lambda: seen.held(["m"]) == {job_id}, 20) < 6
    assert ledger.get(job_id).attempt == 1
