"""What the world sees of a job while it runs: its event stream, its end, and its Celery result, all on Redis.

One thread sends, in one pipeline for each engine step; neither the engine nor the hub ever waits for
it. While Redis is away, token events past a bound are dropped (the text is in the ledger at the end),
but states and results are kept until they can be sent.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis
from celery.utils.log import get_logger
from headrace.contract import JobStatus
from headrace.events import StateEvent, TokenEvent
from headrace.wire import DONE_CHANNEL, STREAM_TTL_S, stream_key
from redis.exceptions import OutOfMemoryError, ReadOnlyError

from engine.request import TokenDelta
from worker.metrics import Metrics

log = get_logger(__name__)

MAX_PENDING = 20_000
"""Engine steps, states and results that may wait; past it token events are dropped."""
BATCH = 256
RETRY_S = 0.5
RENEW_TTL_S = 600.0
"""How often the time to live of a stream that still grows is set again."""


@dataclass(slots=True)
class _Stream:
    attempt: int
    tokens: bool
    expires_set_s: float
    tails: list[TokenEvent] = field(default_factory=list)
    """Text that the engine held back until the attempt ended. It is the job's only if the attempt is."""


@dataclass(frozen=True, slots=True)
class _Begin:
    job_id: str
    attempt: int
    tokens: bool


@dataclass(frozen=True, slots=True)
class _End:
    job_id: str
    attempt: int
    status: JobStatus


@dataclass(frozen=True, slots=True)
class _Drop:
    job_id: str


@dataclass(frozen=True, slots=True)
class _Result:
    store: Callable[[], None]
    done: Callable[[Exception | None], None]


_Item = _Begin | _End | _Drop | _Result | tuple[TokenDelta, ...]


class Telemetry(threading.Thread):
    """Every method may be called from any thread and returns at once."""

    def __init__(self, client: redis.Redis, metrics: Metrics) -> None:
        super().__init__(name="headrace-telemetry", daemon=True)
        self._client = client
        self._metrics = metrics
        self._pending: deque[_Item] = deque()
        self._wake = threading.Event()
        self._streams: dict[str, _Stream] = {}
        self._leave_at_s: float | None = None
        self._dropping = False

    def begin(self, job_id: str, attempt: int, tokens: bool) -> None:
        """An attempt starts: its output begins at offset 0. `tokens` says whether they are wanted."""
        self._put(_Begin(job_id, attempt, tokens))

    def tokens(self, deltas: Sequence[TokenDelta]) -> None:
        """One engine step's output. Dropped when too much waits."""
        if len(self._pending) < MAX_PENDING:
            self._dropping = False
            self._put(tuple(deltas))
        elif not self._dropping:
            self._dropping = True
            log.warning("Redis doesn't take token events: dropping them until it does")

    def end(self, job_id: str, attempt: int, status: JobStatus) -> None:
        """The ledger has the job's outcome, or has it queued again."""
        self._put(_End(job_id, attempt, status))

    def drop(self, job_id: str) -> None:
        """The job goes on elsewhere: say no more of it."""
        self._put(_Drop(job_id))

    def result(self, store: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        """Run `store`, which writes a Celery result, and then call `done`; repeated until Redis takes it."""
        self._put(_Result(store, done))

    def stop(self, patience_s: float) -> None:
        """Send what waits, for at most `patience_s`, and end the thread."""
        self._leave_at_s = time.monotonic() + patience_s
        self._wake.set()
        self.join(patience_s + RETRY_S)

    def _put(self, item: _Item) -> None:
        self._pending.append(item)
        self._wake.set()

    def run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._pending:
                batch = [self._pending.popleft() for _ in range(min(BATCH, len(self._pending)))]
                if not self._deliver(batch):
                    return
            if self._leave_at_s is not None:
                return

    def _deliver(self, batch: list[_Item]) -> bool:
        """Send the batch, again and again until Redis takes it. False if the time to leave came first."""
        while True:
            try:
                self._send(batch)
                return True
            except redis.RedisError as exc:
                log.debug("telemetry waits for Redis: %s", exc)
            except Exception:
                log.exception("telemetry dropped a batch")
                return True
            if self._leave_at_s is not None and time.monotonic() >= self._leave_at_s:
                return False
            time.sleep(RETRY_S)

    def _send(self, batch: list[_Item]) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            for item in batch:
                match item:
                    case _Begin():
                        self._streams[item.job_id] = _Stream(item.attempt, item.tokens, time.monotonic())
                        self._add_state(pipe, item.job_id, item.attempt, JobStatus.RUNNING)
                    case _End():
                        stream = self._streams.get(item.job_id)
                        for tail in stream.tails if item.status.terminal and stream is not None else ():
                            pipe.xadd(stream_key(item.job_id), {"event": tail.model_dump_json()})
                        self._add_state(pipe, item.job_id, item.attempt, item.status)
                        if item.status.terminal:
                            pipe.publish(DONE_CHANNEL, item.job_id)
                    case tuple():
                        self._add_tokens(pipe, item)
                    case _Drop() | _Result():
                        pass
            answers = pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, (OutOfMemoryError, ReadOnlyError)):
                raise answer
            if isinstance(answer, Exception):
                log.error("Redis refused an event: %s", answer)
        for item in batch:
            if isinstance(item, _End | _Drop):
                self._streams.pop(item.job_id, None)
        self._store_results(batch)

    def _store_results(self, batch: list[_Item]) -> None:
        """Results leave the batch as they are stored: a repeated batch sends only events twice, which readers skip."""
        for item in [item for item in batch if isinstance(item, _Result)]:
            try:
                item.store()
            except redis.RedisError:
                raise
            except Exception:
                log.exception("a Celery result can't be stored")
            batch.remove(item)
            item.done(None)

    def _add_state(self, pipe: Any, job_id: str, attempt: int, status: JobStatus) -> None:
        key = stream_key(job_id)
        pipe.xadd(key, {"event": StateEvent(status=status, attempt=attempt).model_dump_json(exclude_none=True)})
        pipe.expire(key, STREAM_TTL_S)

    def _add_tokens(self, pipe: Any, deltas: tuple[TokenDelta, ...]) -> None:
        now = time.monotonic()
        self._metrics.step(deltas)
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None or not stream.tokens:
                continue
            event = TokenEvent(
                attempt=stream.attempt,
                offset=delta.offset,
                text=delta.text,
                token_ids=list(delta.token_ids),
                index=delta.index,
            )
            if not delta.token_ids:
                stream.tails.append(event)
                continue
            key = stream_key(delta.request_id)
            pipe.xadd(key, {"event": event.model_dump_json()})
            if now - stream.expires_set_s > RENEW_TTL_S:
                stream.expires_set_s = now
                pipe.expire(key, STREAM_TTL_S)
