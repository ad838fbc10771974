"""A job's events as server-sent events: from its Redis stream, and from the ledger where that has nothing."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator

import redis.asyncio
from headrace.contract import Job, JobStatus
from headrace.events import StateEvent, TokenEvent, job_event
from headrace.sse import KEEPALIVE_S
from headrace.wire import stream_key
from pydantic import ValidationError

from api.door import Door
from api.streams import ENTRIES, by_stream
from ledger.contract import LedgerUnavailable

SPEAK_S = KEEPALIVE_S - 5.0
"""A reader that has had nothing for this long is told that it is still served; a silent broker may delay that."""
TICK_S = 1.0
"""How often an idle reader looks whether it should stop or say that it is there."""
_STREAM_ID = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")

Entry = tuple[str, StateEvent | TokenEvent]


def is_stream_id(text: str) -> bool:
    """Whether Redis takes `text` for the id of a stream's entry."""
    match = _STREAM_ID.fullmatch(text)
    return match is not None and all(int(part) < 2**64 for part in match.groups())


class Follower:
    """One reader of one job. The job is read from the ledger again for every state that ends it."""

    def __init__(self, door: Door, job: Job, last_id: str | None) -> None:
        self._door = door
        self._job = job
        self._cursor = last_id or "0-0"
        self._key = stream_key(job.id)
        self._chars: dict[int, int] = {}
        """End of the text that this reader has, by completion."""
        self._whole = last_id is None
        """Whether it has nothing of the completions that aren't in `_chars`; else that isn't known."""

    async def frames(self) -> AsyncGenerator[bytes]:
        """SSE frames until the job has ended or the process stops."""
        door, woken = self._door, False
        with door.watch.waiting(self._job.id) as news, door.streams.following(self._key, news):
            await self._refresh()
            if not self._job.status.terminal:
                yield self._state(None)
            spoken_s = time.monotonic()
            while not door.closing.is_set():
                news.clear()
                entries = await self._read()
                for entry_id, event in entries or ():
                    self._cursor = entry_id
                    spoken_s = time.monotonic()
                    if not (isinstance(event, StateEvent) and event.status.terminal):
                        yield self._forward(entry_id, event)
                    elif await self._has_ended_as(event.status):
                        async for last in self._last(entry_id):
                            yield last
                        return
                if entries:
                    woken = False
                    continue
                if self._job.status.terminal:
                    async for last in self._last(None):
                        yield last
                    return
                if (woken or entries is None) and await self._refresh():
                    if entries is None and not self._job.status.terminal:
                        yield self._state(None)
                    continue
                if time.monotonic() - spoken_s >= SPEAK_S:
                    yield b": still here\n\n"
                    spoken_s = time.monotonic()
                woken = await _within(TICK_S, news)

    async def _read(self) -> list[Entry] | None:
        """The stream's next entries; None if the broker is away."""
        try:
            reply = await self._door.broker.xread({self._key: self._cursor}, count=ENTRIES)
        except (redis.RedisError, OSError):
            return None
        entries: list[Entry] = []
        for _, batch in by_stream(reply):
            for entry_id, fields in batch:
                try:
                    entries.append((entry_id, job_event.validate_json(fields.get("event", ""))))
                except ValidationError:
                    self._cursor = entry_id
        return entries

    async def _has_ended_as(self, status: JobStatus) -> bool:
        """Whether that is the job's end, and not the end of a run before it was retried."""
        await self._refresh()
        return self._job.status is status

    async def _refresh(self) -> bool:
        """Read the job again; whether its state or attempt is another."""
        before = (self._job.status, self._job.attempt)
        try:
            self._job = await self._door.job(self._job.id) or self._job
        except LedgerUnavailable:
            return False
        return before != (self._job.status, self._job.attempt)

    def _forward(self, entry_id: str, event: StateEvent | TokenEvent) -> bytes:
        if isinstance(event, TokenEvent):
            self._chars[event.index] = event.offset + len(event.text)
        else:
            self._chars, self._whole = {}, True
        return frame(event, entry_id)

    def _state(self, entry_id: str | None) -> bytes:
        job = self._job if self._job.status.terminal else None
        return frame(StateEvent(status=self._job.status, attempt=self._job.attempt, job=job), entry_id)

    async def _last(self, entry_id: str | None) -> AsyncIterator[bytes]:
        """The text that the stream did not have, and the ended job."""
        unknown = 0 if self._whole or not await self._has_stream() else None
        for index, text in enumerate(self._texts()):
            start = self._chars.get(index, unknown)
            if start is not None and start < len(text):
                event = TokenEvent(attempt=self._job.attempt, index=index, offset=start, text=text[start:])
                yield frame(event, None)
        yield self._state(entry_id)

    def _texts(self) -> list[str]:
        """The text of each completion."""
        result = self._job.result
        if result is None:
            return []
        return [choice.text for choice in result.choices] or [result.text]

    async def _has_stream(self) -> bool:
        try:
            return bool(await self._door.broker.exists(self._key))
        except (redis.RedisError, OSError):
            return False


def frame(event: StateEvent | TokenEvent, entry_id: str | None) -> bytes:
    """One SSE event in ASCII: some clients take Unicode's line separators for ends of lines."""
    data = json.dumps(event.model_dump(mode="json", exclude_none=True), separators=(",", ":"))
    head = f"id: {entry_id}\n" if entry_id is not None else ""
    return f"{head}event: {event.event}\ndata: {data}\n\n".encode()


async def _within(seconds: float, event: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
