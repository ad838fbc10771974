"""Leases on the broker's messages, for a transport that has only a visibility timeout.

Kombu stamps a message when it is received and never again, so a job that runs longer than the timeout
is handed out twice. It hands back every message when a connection breaks, also those whose jobs run on
here. And an acknowledgement through a dead connection is lost, or ends the worker. So:

- every message that this worker holds is stamped again, well before anybody takes it for lost, by the broker's clock;
- what wasn't stamped for seconds was held by a dead worker and is handed out again, long before the visibility timeout;
- a broken connection hands back only messages whose jobs are not here, and the next one adopts the others;
- acknowledgements are sent together once the hub has done its round, and kept until a live connection has them;
- a worker that leaves puts back the message that its last read may bring.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import redis
from celery import bootsteps
from celery.utils.log import get_logger
from headrace.contract import utc_now
from headrace.counting import counted
from headrace.wire import (
    QUEUE_PREFIX,
    SILENT_S,
    STAMP_S,
    VISIBILITY_TIMEOUT_S,
    WORKER_KEY_TTL_S,
    queue_name,
    worker_key,
)
from kombu.transport import redis as transport

from ledger.transport import broker_now_s
from settings import get_settings
from worker import fetch
from worker.envelope import JobMessage, read

if TYPE_CHECKING:
    from worker.pool import EnginePool

log = get_logger(__name__)

LISTEN_EVERY_S = 0.5
GRACE_S = STAMP_S + 1.0
"""After a connection was made the other workers have this long to make theirs, and to stamp what they hold."""
SPARE_SHARE = 8
"""For one in so many of the engine's places a job more is held, ready to take the next one that comes free."""
EVENTS_MOST = 1000
"""Celery's events in one publication."""
RESTORE_MOST = 1000
"""Silent messages that are looked at in one round."""


@contextmanager
def _no_message() -> Iterator[None]:
    """Outlive what was on a queue and can't be delivered."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError) as exc:
        log.error("something on the queue was no message and is gone: %s", type(exc).__name__)


class LeasedQoS(transport.QoS):
    """The transport's list of unacknowledged messages, which keeps those of running jobs."""

    pool: ClassVar[EnginePool | None] = None
    clock_offset_s: ClassVar[float] = 0.0
    """What the broker's clock is ahead of this host's."""
    restore_from_s: ClassVar[float] = 0.0
    """Not before this moment of the monotonic clock is anything taken for silent."""

    @classmethod
    def read_clock(cls, client: Any) -> float:
        """The moment by the broker's clock, which all who share the broker agree on."""
        now_s = broker_now_s(client)
        cls.clock_offset_s = now_s - time.time()
        return now_s

    @classmethod
    def held(cls) -> set[str]:
        """Delivery tags of the jobs that are in the pool."""
        return {slot.message.delivery_tag for slot in cls.pool.slots.values()} if cls.pool is not None else set()

    def adopt(self, pool: EnginePool) -> None:
        """Take over the messages of running jobs from the channel that broke: they are acknowledged here now."""
        for slot in pool.slots.values():
            message = slot.message.message
            message.channel = self.channel
            self._delivered[message.delivery_tag] = message

    def append(self, message: Any, delivery_tag: str) -> None:
        """Note a message as unacknowledged, as kombu does but for whose clock it is; unless the broker has."""
        if delivery_tag == self.channel.noted_tag:
            self.channel.noted_tag = ""
            super(transport.QoS, self).append(message, delivery_tag)  # type: ignore[no-untyped-call]
            return
        info = message.delivery_info
        held = json.dumps([message._raw, info["exchange"], info["routing_key"]])
        with self.pipe_or_acquire() as pipe:
            pipe.zadd(self.unacked_index_key, {delivery_tag: time.time() + self.clock_offset_s})
            pipe.hset(self.unacked_key, delivery_tag, held)
            pipe.execute()
        super(transport.QoS, self).append(message, delivery_tag)  # type: ignore[no-untyped-call]

    def restore_visible(self, start: int = 0, num: int | None = None, interval: int = 1) -> None:
        """Hand out again what nobody stamps any more. Several workers may: a message is moved in one transaction."""
        if time.monotonic() < self.restore_from_s:
            return
        with self.channel.conn_or_acquire() as client:
            now_s = self.read_clock(client)
            silent = client.zrangebyscore(
                self.unacked_index_key, "-inf", now_s - SILENT_S, start=0, num=RESTORE_MOST, withscores=True
            )
            held = client.hmget(self.unacked_key, [tag for tag, _ in silent]) if silent else []
            for (tag, stamped_s), message in zip(silent, held, strict=True):
                if tag.decode() in self._delivered:
                    continue
                if is_ours(message) or stamped_s <= now_s - VISIBILITY_TIMEOUT_S:
                    self.restore_by_tag(tag, client)  # type: ignore[no-untyped-call]

    def can_consume(self) -> bool:
        return self.can_consume_max_estimate() > 0

    def can_consume_max_estimate(self) -> int:
        """How many more messages this worker takes: a few more than the engine holds, so that it never waits for one
        while others are committed. None while a job has to be alone: what came would only wait here.
        """
        if self.pool is None:
            return fetch.MOST
        if self.pool.gate.closed:
            return 0
        held = len(self._delivered) - len(self._dirty)
        return (
            max(0, self.prefetch_count + self.pool.limit // SPARE_SHARE - held) if self.prefetch_count else fetch.MOST
        )

    def ack(self, delivery_tag: str) -> None:
        """Free the message's place; the broker hears of it by `settle`."""
        if self.pool is not None:
            self.pool.settled.append(delivery_tag)
        super(transport.QoS, self).ack(delivery_tag)  # type: ignore[no-untyped-call]

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """What can't be told to a broker that is away is handed out again after its timeout."""
        if self.channel.reachable:
            super().reject(delivery_tag, requeue)  # type: ignore[no-untyped-call]

    def restore_unacked(self, client: Any = None) -> None:
        self._flush()  # type: ignore[no-untyped-call]
        for tag in self.held() & set(self._delivered):
            self._delivered.pop(tag)
        try:
            super().restore_unacked(client)  # type: ignore[no-untyped-call]
        except (AttributeError, *self.channel.connection_errors) as exc:
            # A channel that has lost its connection has no client: kombu's error for it is an AttributeError.
            held = counted(len(self._delivered), "message comes", "messages come")
            log.warning("%s back after the visibility timeout: %r", held, exc)
        finally:
            self._delivered.clear()


def is_ours(held: bytes | None) -> bool:
    """Whether a noted message came from a queue of Headrace's, whose workers stamp what they hold."""
    try:
        _, _, routing_key = json.loads(held or b"")
    except ValueError:
        return held is None
    return isinstance(routing_key, str) and routing_key.startswith(QUEUE_PREFIX)


class JobChannel(transport.Channel):
    """A channel whose reader outlives what isn't even a message, and which waits for a silent broker only once."""

    QoS = LeasedQoS
    Message = JobMessage
    silent: ClassVar[bool] = False
    """Whether the broker has let a command of the hub go unanswered. Until it answers again, the hub asks nothing.

    The relay's channels, on a thread of its own, may wait for what takes its time.
    """

    noted_tag: str = ""
    """Of the message that is being delivered, if the broker has noted it already."""

    behind: bool = False
    """Whether acknowledgements couldn't be sent: they go with the next stamps."""

    @property
    def reachable(self) -> bool:
        """Whether the broker is to be asked anything on this channel."""
        return not self.closed and not JobChannel.silent

    def _create_client(self, asynchronous: bool = False) -> Any:
        """One client for each pool of connections. kombu makes one for each command, which costs more than that."""
        pool = self.async_pool if asynchronous else self.pool
        client = self._clients.get(asynchronous)
        if client is None or client.connection_pool is not pool:
            client = self._clients[asynchronous] = super()._create_client(asynchronous)  # type: ignore[no-untyped-call]
        return client

    @cached_property
    def _clients(self) -> dict[bool, Any]:
        return {}

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        on_hub = threading.current_thread() is threading.main_thread()
        if on_hub and JobChannel.silent:
            raise redis.ConnectionError("the broker doesn't answer")
        try:
            with super().conn_or_acquire(client) as found:
                yield found
        except redis.TimeoutError:
            JobChannel.silent |= on_hub
            raise

    def _brpop_read(self, **options: Any) -> Any:
        """Deliver the message that the broker woke this worker with, and more if they wait and there is room."""
        with _no_message():
            super()._brpop_read(**options)  # type: ignore[no-untyped-call]
        if (room := self.qos.can_consume_max_estimate()) > 0:
            self._deliver_more(room)
        return True

    def _deliver_more(self, room: int) -> None:
        queues = [(queue, step) for step in self.priority_steps for queue in self.active_queues]
        lists = [self._q_for_pri(queue, step) for queue, step in queues]  # type: ignore[no-untyped-call]
        with self.conn_or_acquire() as client:
            taken = fetch.take(client, self.unacked_key, self.unacked_index_key, lists, min(room, fetch.MOST))
        for one in taken:
            self.noted_tag = one.tag
            with _no_message():
                self.connection._deliver(read(one.text), queues[one.place][0])
            if self.noted_tag:
                # It was noted under a tag that the worker doesn't know it by.
                self.forget([self.noted_tag])
                self.noted_tag = ""

    def forget(self, tags: Sequence[str]) -> bool:
        """Remove messages from those that are held, in one round trip. False if the broker has to be asked again."""
        if not self.reachable or self.behind:
            return False
        try:
            with self.conn_or_acquire() as client, client.pipeline(transaction=True) as pipe:
                pipe.zrem(self.unacked_index_key, *tags)
                pipe.hdel(self.unacked_key, *tags)
                pipe.execute()
        except self.connection_errors as exc:
            log.warning("to be repeated: %s: %r", counted(len(tags), "acknowledgement"), exc)
            self.behind = True
            return False
        return True

    def put_back(self) -> None:
        """Await the answer to the read that is under way, and return what it brings to the head of its list.

        Redis answers it with the next message, or after `brpop_timeout` with none; nobody else would read that message.
        """
        reading: Any = self._in_poll
        if not reading or not reading.can_read(timeout=self.brpop_timeout + 1):
            return
        answer = self.client.parse_response(reading, "BRPOP")
        self._in_poll = False
        if answer:
            key, message = answer
            with self.conn_or_acquire() as client:
                client.rpush(key, message)


def require_answers(pool: EnginePool) -> None:
    """Have the consumer give its connection up, if the broker has fallen silent on any channel."""
    if JobChannel.silent and not pool.leaving:
        raise redis.ConnectionError("the broker doesn't answer")


class LeaseStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Stamps the messages that are held, and shows that this worker consumes."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, c: Any, **options: Any) -> None:
        super().__init__(c, **options)
        LeasedQoS.pool = c.pool
        transport.Transport.Channel = JobChannel
        self._timers: list[Any] = []

    def start(self, c: Any) -> None:
        LeasedQoS.restore_from_s = time.monotonic() + GRACE_S
        channel = c.task_consumer.channel
        with channel.conn_or_acquire() as client:
            LeasedQoS.read_clock(client)
        channel.qos.adopt(c.pool)
        c.pool.forget = channel.forget
        if c.event_dispatcher:
            # The events of one round of the hub go together.
            c.event_dispatcher.buffer_limit = EVENTS_MOST

    def register_with_event_loop(self, c: Any, hub: Any) -> None:
        for timer in self._timers:
            timer.cancel()
        period_s = min(c.pool.services.lease_s / 3, STAMP_S, WORKER_KEY_TTL_S / 5)
        self._timers = [
            hub.call_repeatedly(period_s, self.stamp, c),
            hub.call_repeatedly(LISTEN_EVERY_S, require_answers, c.pool),
        ]
        self.stamp(c)

    def stamp(self, c: Any) -> None:
        """Renew the stamps of all held messages, and repeat what was acknowledged in vain.

        An error of the connection is the end of it: the consumer makes a new one, unless it is leaving.
        """
        channel = c.task_consumer and c.task_consumer.channel
        if not channel or channel.closed:
            return
        try:
            self._renew(c, channel)
        except channel.connection_errors as exc:
            if not c.pool.leaving:
                raise
            log.warning("messages could not be stamped: %r", exc)

    def _renew(self, c: Any, channel: Any) -> None:
        pool: EnginePool = c.pool
        settled = list(pool.settled)
        tags = (set(channel.qos._delivered) | LeasedQoS.held()) - set(settled)
        with channel.conn_or_acquire() as client, client.pipeline(transaction=True) as pipe:
            now_s = LeasedQoS.read_clock(client)
            if tags:
                # XX: a message that somebody has acknowledged must not come back.
                pipe.zadd(channel.unacked_index_key, dict.fromkeys(tags, now_s), xx=True)
            if settled:
                pipe.zrem(channel.unacked_index_key, *settled)
                pipe.hdel(channel.unacked_key, *settled)
            if not pool.leaving:
                signed = bool(get_settings().accepted_secrets)
                seen = json.dumps({"model": pool.services.model, "at": utc_now().isoformat(), "signed": signed})
                pipe.set(worker_key(c.hostname), seen, ex=WORKER_KEY_TTL_S)
            queue = queue_name(pool.services.model)
            for step in channel.priority_steps:
                pipe.llen(channel._q_for_pri(queue, step))
            answers = pipe.execute()
        waiting = sum(answers[-len(channel.priority_steps) :])
        pool.liveness.saw(waiting, pool.has_room, time.monotonic())
        del pool.settled[: len(settled)]
        channel.behind = False

    def stop(self, c: Any) -> None:
        """Leaving, or the connection broke: nobody is to think that this worker consumes."""
        channel = c.task_consumer and c.task_consumer.channel
        if channel and not channel.closed and not JobChannel.silent:
            try:
                with channel.conn_or_acquire() as client:
                    client.delete(worker_key(c.hostname))
                channel.put_back()
            except channel.connection_errors as exc:
                log.warning("the broker is away: this worker's key will expire by itself: %r", exc)
