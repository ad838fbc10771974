"""Says when jobs' event streams have grown: one blocking read for all of them, however many follow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis.asyncio
from headrace.waits import Backoff

log = logging.getLogger(__name__)

BLOCK_MS = 100
"""How long one read waits: the most that a stream just followed is not yet watched."""
ENTRIES = 100

Entries = list[tuple[str, dict[str, str]]]


class StreamNews:
    """Watches the streams that are being followed. Followers read for themselves, from where each of them stands."""

    def __init__(self, broker: redis.asyncio.Redis) -> None:
        self._broker = broker
        self._followers: dict[str, set[asyncio.Event]] = {}
        self._cursors: dict[str, str] = {}
        """Id of the last entry that was seen, for each stream that is being watched."""
        self._followed = asyncio.Event()

    @contextmanager
    def following(self, key: str, news: asyncio.Event) -> Iterator[None]:
        """Set `news` whenever the stream `key` grows, and once when the watch over it begins."""
        self._followers.setdefault(key, set()).add(news)
        self._followed.set()
        try:
            yield
        finally:
            events = self._followers[key]
            events.discard(news)
            if not events:
                del self._followers[key]
                self._cursors.pop(key, None)

    async def run(self) -> None:
        """Watch until cancelled."""
        backoff = Backoff()
        while True:
            if not self._followers:
                self._followed.clear()
                await self._followed.wait()
            try:
                await self._begin([key for key in self._followers if key not in self._cursors])
                await self._look()
                backoff.reset()
            except (redis.RedisError, OSError) as error:
                log.warning("events can't be read from the broker: %s", error)
                await asyncio.sleep(backoff.delay_s())

    async def _begin(self, keys: list[str]) -> None:
        if not keys:
            return
        pipeline = self._broker.pipeline(transaction=False)
        for key in keys:
            pipeline.xrevrange(key, count=1)
        for key, last in zip(keys, await pipeline.execute(), strict=True):
            if key in self._followers:
                self._cursors[key] = last[0][0] if last else "0-0"
                self._tell(key)

    async def _look(self) -> None:
        if not self._cursors:
            return
        cursors: dict[Any, Any] = dict(self._cursors)
        reply = await self._broker.xread(cursors, count=ENTRIES, block=BLOCK_MS)
        for key, entries in by_stream(reply):
            if key in self._cursors:
                self._cursors[key] = entries[-1][0]
                self._tell(key)

    def _tell(self, key: str) -> None:
        for event in self._followers.get(key, ()):
            event.set()


def by_stream(reply: Any) -> list[tuple[str, Entries]]:
    """What XREAD answered, stream by stream: it is a map in RESP3 and a list of pairs in RESP2."""
    if not reply:
        return []
    if isinstance(reply, dict):
        return [(key, [entry for batch in batches for entry in batch]) for key, batches in reply.items()]
    return [(key, list(entries)) for key, entries in reply]
