"""Wakes whoever waits for a job to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator
from typing import Protocol

import redis.asyncio
from headrace.waits import Backoff
from headrace.wire import DONE_CHANNEL

from ledger.contract import LedgerUnavailable

log = logging.getLogger(__name__)


class Ended(Protocol):
    async def __call__(self, job_ids: Collection[str]) -> Collection[str]:
        """Those of the jobs that have ended."""
        ...


class EndWatch:
    """One Redis subscription, and one look into the ledger each second, for all waiters together.

    The subscription wakes a waiter within a millisecond or so; the ledger is the truth that covers
    a lost publication, a broker that is away, and ends that nobody publishes.
    """

    def __init__(self, broker: redis.asyncio.Redis, ended: Ended, interval_s: float = 1.0) -> None:
        self._broker = broker
        self._ended = ended
        self._interval_s = interval_s
        self._waiters: dict[str, set[asyncio.Event]] = {}

    @contextlib.contextmanager
    def waiting(self, job_id: str) -> Iterator[asyncio.Event]:
        """An event that is set when the job ends after this moment. Read the ledger only inside."""
        event = asyncio.Event()
        self._waiters.setdefault(job_id, set()).add(event)
        try:
            yield event
        finally:
            events = self._waiters[job_id]
            events.discard(event)
            if not events:
                del self._waiters[job_id]

    @property
    def waiters(self) -> int:
        return sum(map(len, self._waiters.values()))

    def wake(self, job_id: str) -> None:
        for event in self._waiters.get(job_id, ()):
            event.set()

    async def listen(self) -> None:
        """Wake whoever waits for a job that a worker says has ended."""
        backoff = Backoff()
        while True:
            try:
                async with self._broker.pubsub(ignore_subscribe_messages=True) as pubsub:
                    await pubsub.subscribe(DONE_CHANNEL)
                    while True:
                        message = await pubsub.get_message(timeout=30.0)
                        backoff.reset()
                        if message is not None:
                            for job_id in message["data"].split():
                                self.wake(job_id)
            except (redis.RedisError, OSError) as error:
                log.warning("no news of ended jobs from the broker (%s); the ledger is read each second", error)
                await asyncio.sleep(backoff.delay_s())

    async def look(self) -> None:
        """Wake whoever waits for a job that the ledger says has ended."""
        while True:
            await asyncio.sleep(self._interval_s)
            if not self._waiters:
                continue
            try:
                for job_id in await self._ended(list(self._waiters)):
                    self.wake(job_id)
            except LedgerUnavailable:
                log.warning("the ledger can't be read; waiters stay")
