"""The broker as the relay sees it: Celery messages go out, and the ids of the messages that it holds come back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from celery import Celery
from headrace.contract import Priority
from headrace.publication import JobMessage, publish
from headrace.urls import masked
from headrace.wire import SILENT_S, celery_config, queue_keys
from kombu.exceptions import KombuError
from redis.exceptions import RedisError

from ledger.contract import Dispatch

SOCKET_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 3.0
_CHUNK = 200


def broker_now_s(client: Any) -> float:
    """Unix time by the broker's clock, on which all who stamp and read messages agree."""
    seconds, microseconds = client.time()
    return float(seconds) + float(microseconds) / 1e6


class BrokerAway(RuntimeError):
    """The broker can't be reached, or refused. What was being sent may or may not have arrived."""


class CeleryTransport:
    """One connection to the broker, made when it is needed and dropped after any failure. For one thread."""

    def __init__(self, broker_url: str, signing_key: str | None = None) -> None:
        self._signing_key = signing_key
        config = celery_config(broker_url)
        options = {"socket_timeout": SOCKET_TIMEOUT_S, "socket_connect_timeout": CONNECT_TIMEOUT_S}
        config["broker_transport_options"] = {**config["broker_transport_options"], **options}
        config["task_publish_retry"] = False
        config["result_backend"] = None  # or the sender would subscribe to each result
        self._app = Celery("headrace.relay", set_as_current=False)
        self._app.conf.update(config)
        self._app.control.mailbox.producer_pool = None
        self._connection: Any = None

    def __repr__(self) -> str:
        return f"CeleryTransport({masked(self._app.conf.broker_url)!r})"

    def ping(self) -> None:
        """Raise BrokerAway unless the broker answers."""
        with self._channel() as channel, channel.conn_or_acquire() as client:
            client.ping()

    def publish(self, dispatches: Sequence[Dispatch]) -> None:
        """Send a message for each job, in one pipeline.

        Its end is stored for `AsyncResult` as for any task: perhaps it stands for a producer's own message that was
        handed back or lost with a worker, and the producer waits.
        """
        with self._channel() as channel:
            producer = self._app.amqp.Producer(channel, auto_declare=False)
            publish(self._app, producer, [_message(one) for one in dispatches], self._signing_key)

    def revoke(self, dispatches: Sequence[Dispatch]) -> None:
        """Tell every worker to stop these attempts. One that hears it late leaves a later attempt alone."""
        fences = {dispatch.job_id: dispatch.fence for dispatch in dispatches}
        arguments = {"task_id": list(fences), "terminate": True, "signal": "SIGTERM", "fences": fences}
        with self._channel():
            self._app.control.broadcast("revoke", arguments=arguments, connection=self._connection)

    def depth(self, models: Sequence[str]) -> int:
        """How many messages the broker holds: in the queues of these models, and with workers that are alive."""
        with self._channel() as channel, channel.conn_or_acquire() as client, client.pipeline() as pipe:
            since_s = broker_now_s(client) - SILENT_S
            for key in _keys(models):
                pipe.llen(key)
            pipe.zcount(channel.unacked_index_key, since_s, "+inf")
            return sum(pipe.execute())

    def held(self, models: Sequence[str]) -> set[str]:
        """The jobs of those messages. Queues are read before what workers hold, as that is the way messages go."""
        with self._channel() as channel, channel.conn_or_acquire() as client:
            ids = {_task_id(item) for key in _keys(models) for item in _list_items(client, key)}
            tags = client.zrangebyscore(channel.unacked_index_key, broker_now_s(client) - SILENT_S, "+inf")
            for start in range(0, len(tags), _CHUNK):
                ids.update(map(_task_id, client.hmget(channel.unacked_key, tags[start : start + _CHUNK])))
        return {task_id for task_id in ids if task_id is not None}

    def close(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                self._connection.release()
            self._connection = None

    @contextmanager
    def _channel(self) -> Iterator[Any]:
        try:
            if self._connection is None:
                self._connection = self._app.connection_for_write()
            self._connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
            yield self._connection.default_channel
        except (KombuError, RedisError, OSError) as error:
            self.close()
            raise BrokerAway(str(error)) from error
        except BaseException:
            self.close()
            raise


def _message(one: Dispatch) -> JobMessage:
    return JobMessage(one.job_id, one.model, Priority(one.priority), {"job_id": one.job_id}, one.traceparent)


def _keys(models: Sequence[str]) -> list[str]:
    return [key for model in models for key in queue_keys(model)]


def _list_items(client: Any, key: str) -> Iterator[bytes]:
    """A list's items from its young end: what is pushed meanwhile shows items twice, but hides none."""
    start = 0
    while chunk := client.lrange(key, start, start + _CHUNK - 1):
        yield from chunk
        start += _CHUNK


def _task_id(item: bytes | None) -> str | None:
    """The task id in a queue's item, or in what a worker holds of it; None for what no Celery producer wrote."""
    try:
        entry = json.loads(item or b"null")
        message = entry[0] if isinstance(entry, list) else entry
        return str(message["headers"]["id"])
    except (ValueError, LookupError, TypeError):
        return None
