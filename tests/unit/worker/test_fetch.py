"""Messages taken off a real broker, many at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.conftest import Broker
from worker.fetch import Taken, take

LISTS = ["q", "q:low"]


@pytest.fixture
def client(broker: Broker) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(broker.url) as client:
        yield client


def message(tag: object, **more: Any) -> str:
    delivery = {"exchange": "", "routing_key": 'q"ä'}
    return json.dumps({"body": "x", "properties": {"delivery_tag": tag, "delivery_info": delivery}, **more})


def tags(found: list[Taken]) -> list[tuple[int, str]]:
    return [(one.place, one.tag) for one in found]


def taken(client: redis.Redis, most: int) -> list[Taken]:
    return take(client, "unacked", "unacked_index", LISTS, most)


def test_the_oldest_of_the_first_list_come_first(client: redis.Redis) -> None:
    client.lpush("q:low", message("l1"), message("l2"))
    client.lpush("q", message("h1"), message("h2"))
    assert tags(taken(client, 2)) == [(0, "h1"), (0, "h2")]
    assert tags(taken(client, 9)) == [(1, "l1")], "half of what waits, and one of one"
    assert tags(taken(client, 9)) == [(1, "l2")]
    assert taken(client, 9) == []


def test_what_is_off_its_list_is_noted_as_the_transport_notes_it(client: redis.Redis) -> None:
    """Learned from llm-d-async 404: a hard-killed worker loses what it had taken."""
    sent = message("t", number=12345678901234567890, real=0.1)
    client.lpush("q", sent)
    [found] = taken(client, 1)
    assert found.text.decode() == sent
    assert json.loads(client.hget("unacked", "t") or b"") == [json.loads(sent), "", 'q"ä']
    assert client.zscore("unacked_index", "t") == pytest.approx(time.time(), abs=5)


@pytest.mark.parametrize("text", ["no JSON", "[]", "7", message(3), message(None), json.dumps({"properties": {}})])
def test_what_is_no_message_is_handed_over_unnoted(client: redis.Redis, text: str) -> None:
    client.lpush("q", text)
    assert taken(client, 1) == [Taken(0, "", text.encode())]
    assert not client.exists("q", "unacked", "unacked_index")


def test_a_broker_without_memory_keeps_its_messages(client: redis.Redis) -> None:
    client.lpush("q", message("a"), message("b"))
    client.config_set("maxmemory", "1")
    with pytest.raises(redis.RedisError):
        taken(client, 1)
    client.config_set("maxmemory", "0")
    assert client.llen("q") == 2
    assert tags(taken(client, 1)) == [(0, "a")]
