"""The transport against a real broker: what is sent, what is seen, and that it never hangs."""

from __future__ import annotations

import base64
import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from headrace.contract import Priority, new_job_id
from headrace.wire import SILENT_S, broker_priority, queue_name

from ledger import transport as transport_module
from ledger.contract import Dispatch, Topic
from ledger.transport import BrokerAway, CeleryTransport


@pytest.fixture
def transport(broker_url: str) -> Iterator[CeleryTransport]:
    transport = CeleryTransport(broker_url)
    yield transport
    transport.close()


@pytest.fixture
def client(broker_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(broker_url) as client:
        yield client


def publication(model: str = "m", priority: str = "normal") -> Dispatch:
    return Dispatch(0, Topic.PUBLISH, new_job_id(), model, priority)


def revocation(job_id: str, fence: int) -> Dispatch:
    return Dispatch(0, Topic.REVOKE, job_id, "m", "normal", fence)


def hold(client: Any, key: str, score: float) -> str:
    """Take one message as kombu does: out of the queue, into `unacked`. Returns its task id."""
    message = json.loads(client.rpop(key))
    tag = message["properties"]["delivery_tag"]
    client.zadd("unacked_index", {tag: score})
    client.hset("unacked", tag, json.dumps([message, "", key]))
    return str(message["headers"]["id"])


def test_a_message_names_its_job_and_nothing_else(transport: CeleryTransport, client: Any) -> None:
    dispatch = publication()
    transport.publish([dispatch])
    message = json.loads(client.lindex(f"{queue_name('m')}\x06\x16{broker_priority(Priority.NORMAL)}", 0))
    headers = message["headers"]
    assert headers["task"] == "headrace.generate"
    assert headers["id"] == dispatch.job_id
    assert not headers["ignore_result"]
    assert headers["argsrepr"] == "-"
    assert message["properties"]["priority"] == broker_priority(Priority.NORMAL)
    assert json.loads(base64.b64decode(message["body"]))[:2] == [[], {"job_id": dispatch.job_id}]


def test_priorities_go_to_their_own_lists(transport: CeleryTransport, client: Any) -> None:
    """celery 4028: on Redis 0 is served first."""
    transport.publish([publication(priority=priority.value) for priority in Priority])
    queue = queue_name("m")
    assert [client.llen(key) for key in (queue, f"{queue}\x06\x163", f"{queue}\x06\x166")] == [1, 1, 1]


def test_messages_are_served_in_the_order_they_were_sent(transport: CeleryTransport, client: Any) -> None:
    dispatches = [publication() for _ in range(5)]
    transport.publish(dispatches)
    key = f"{queue_name('m')}\x06\x163"
    served = [json.loads(client.rpop(key))["headers"]["id"] for _ in range(5)]
    assert served == [d.job_id for d in dispatches]


def test_a_batch_is_one_pipeline(transport: CeleryTransport, client: Any) -> None:
    transport.publish([publication()])
    reads = client.info("stats")["total_reads_processed"]
    transport.publish([publication() for _ in range(500)])
    assert client.info("stats")["total_reads_processed"] - reads < 500
    assert transport.depth(["m"]) == 501


def test_depth_and_held_see_every_list_and_what_live_workers_hold(transport: CeleryTransport, client: Any) -> None:
    dispatches = [publication(priority=p.value) for p in Priority] + [publication("other"), publication("third")]
    transport.publish(dispatches)
    now = time.time()
    alive = hold(client, queue_name("m"), now)
    dead = hold(client, f"{queue_name('m')}\x06\x163", now - SILENT_S - 1)
    ids = {d.job_id for d in dispatches}
    assert transport.depth(["m", "other"]) == 3
    assert transport.held(["m", "other"]) == ids - {dead, dispatches[4].job_id}
    assert alive in transport.held(["m"])


def test_long_queues_are_read_whole(transport: CeleryTransport) -> None:
    dispatches = [publication() for _ in range(2 * transport_module._CHUNK + 7)]
    transport.publish(dispatches)
    assert transport.held(["m"]) == {d.job_id for d in dispatches}


@pytest.mark.parametrize("junk", [b"no json", b"[]", b"{}", b"17", b'{"headers": {}}', b'{"headers": null}'])
def test_foreign_items_are_passed_over(transport: CeleryTransport, client: Any, junk: bytes) -> None:
    dispatch = publication()
    transport.publish([dispatch])
    client.lpush(queue_name("m"), junk)
    client.hset("unacked", "tag", junk)
    client.zadd("unacked_index", {"tag": time.time(), "vanished": time.time()})
    assert transport.held(["m"]) == {dispatch.job_id}


def test_a_revocation_reaches_every_worker(transport: CeleryTransport, client: Any) -> None:
    with client.pubsub() as pubsub:
        pubsub.psubscribe("*celery.pidbox*")
        transport.revoke([revocation("a", 3), revocation("b", 7)])
        end_s = time.monotonic() + 5
        message = None
        while message is None and time.monotonic() < end_s:
            message = pubsub.get_message(ignore_subscribe_messages=True, timeout=0.2)
    assert message is not None
    body = json.loads(base64.b64decode(json.loads(message["data"])["body"]))
    assert body["method"] == "revoke"
    fences = {"a": 3, "b": 7}
    assert body["arguments"] == {"task_id": ["a", "b"], "terminate": True, "signal": "SIGTERM", "fences": fences}


def test_it_shows_no_password() -> None:
    assert "hunter2" not in repr(CeleryTransport("redis://:hunter2@127.0.0.1:1/0"))


@pytest.mark.parametrize("call", ["ping", "publish", "revoke", "depth", "held"])
def test_a_broker_that_is_away_is_reported_soon(call: str) -> None:
    transport = CeleryTransport("redis://127.0.0.1:1/0")
    arguments: dict[str, list[Any]] = {
        "ping": [],
        "publish": [[publication()]],
        "revoke": [[revocation("a", 1)]],
        "depth": [["m"]],
        "held": [["m"]],
    }
    began_s = time.monotonic()
    with pytest.raises(BrokerAway):
        getattr(transport, call)(*arguments[call])
    assert time.monotonic() - began_s < 5


def test_a_broker_that_restarts_is_used_again(broker: Any) -> None:
    transport = CeleryTransport(broker.url)
    transport.publish([publication()])
    broker.kill()
    with pytest.raises(BrokerAway):
        transport.publish([publication()])
    broker.start()
    transport.ping()
    transport.publish([publication()])
    transport.revoke([revocation("a", 1)])
    transport.close()
    transport.close()


@pytest.mark.slow
def test_a_broker_that_hangs_is_away(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "SOCKET_TIMEOUT_S", 0.5)
    transport = CeleryTransport(broker.url)
    transport.ping()
    broker.kill(signal.SIGSTOP)
    began_s = time.monotonic()
    with pytest.raises(BrokerAway):
        transport.publish([publication()])
    with pytest.raises(BrokerAway):
        transport.depth(["m"])
    assert time.monotonic() - began_s < 10
    broker.kill(signal.SIGCONT)
    transport.ping()
    transport.close()
