"""What the world sees of a job while it runs: its event stream, its end, and its Celery result, all on Redis.

One thread sends, in one pipeline for all that waits; neither the engine nor the hub ever waits for it.
While Redis is away, token events past a bound are dropped (the text is in the ledger at the end),
but states and results are kept until they can be sent.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import redis
from celery.utils.log import get_logger
from headrace.contract import JobStatus
from headrace.wire import STREAM_TTL_S
from redis.exceptions import OutOfMemoryError, ReadOnlyError

from engine.request import TokenDelta
from worker.job_stream import JobStream, Outgoing, tell_state
from worker.metrics import Metrics

log = get_logger(__name__)

MAX_PENDING = 20_000
"""Engine steps, states and results that may wait; past it token events are dropped."""
BATCH = 1024
PAUSE_S = 0.005
"""Between two pipelines, if there is so much to send: what comes meanwhile shares the next one."""
RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class _Begin:
    job_id: str
    attempt: int
    tokens: bool
    revision: str


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
    compose: Callable[[Outgoing], None]
    done: Callable[[None], None]


@dataclass(frozen=True, slots=True)
class _Save:
    job_id: str
    done: Callable[[None], None]


_Item = _Begin | _End | _Drop | _Result | _Save | tuple[TokenDelta, ...]


class Telemetry(threading.Thread):
    """Every method may be called from any thread and returns at once."""

    def __init__(self, client: redis.Redis, metrics: Metrics, ttl_s: int = STREAM_TTL_S) -> None:
        super().__init__(name="headrace-telemetry", daemon=True)
        self._client = client
        self._metrics = metrics
        self._ttl_s = ttl_s
        """How long streams live after their last event."""
        self._pending: deque[_Item] = deque()
        self._wake = threading.Event()
        self._streams: dict[str, JobStream] = {}
        self._leave_at_s: float | None = None
        self._dropping = False

    def begin(self, job_id: str, attempt: int, tokens: bool, revision: str) -> None:
        """An attempt starts: its output begins at offset 0. `tokens` says whether readers want them."""
        self._put(_Begin(job_id, attempt, tokens, revision))

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

    def save(self, job_id: str, done: Callable[[None], None]) -> None:
        """Call `done` once another worker can find all that the job has produced here."""
        self._put(_Save(job_id, done))

    def drop(self, job_id: str) -> None:
        """The job goes on elsewhere: say no more of it."""
        self._put(_Drop(job_id))

    def result(self, compose: Callable[[Outgoing], None], done: Callable[[None], None]) -> None:
        """Send what `compose` adds, a Celery result, and call `done` once Redis has it. One that fails is logged."""
        self._put(_Result(compose, done))

    def stop(self, patience_s: float) -> None:
        """Send what waits, for at most `patience_s`, and end the thread."""
        self._leave_at_s = time.monotonic() + patience_s
        self._wake.set()
        self.join(patience_s + RETRY_S)

    def _put(self, item: _Item) -> None:
        self._pending.append(item)
        self._wake.set()

    def run(self) -> None:
        sent_s = 0.0
        while True:
            self._wake.wait()
            time.sleep(max(0.0, sent_s + PAUSE_S - time.monotonic()))
            self._wake.clear()
            while self._pending:
                batch = [self._pending.popleft() for _ in range(min(BATCH, len(self._pending)))]
                if not self._deliver(batch):
                    return
            sent_s = time.monotonic()
            if self._leave_at_s is not None:
                return

    def _deliver(self, batch: list[_Item]) -> bool:
        """Send the batch, again and again until Redis takes it. False if the time to leave came first."""
        out = self._composed(batch)
        while True:
            try:
                _send(out, self._client)
                break
            except redis.RedisError as exc:
                log.debug("telemetry waits for Redis: %s", exc)
            except Exception:
                log.exception("telemetry dropped a batch")
                break
            if self._leave_at_s is not None and time.monotonic() >= self._leave_at_s:
                return False
            time.sleep(RETRY_S)
        for item in batch:
            if isinstance(item, (_Save, _Result)):
                item.done(None)
        return True

    def _composed(self, batch: list[_Item]) -> Outgoing:
        """What the batch tells, as commands for Redis."""
        out, now_s = Outgoing(self._ttl_s), time.monotonic()
        for item in batch:
            match item:
                case _Begin():
                    stream = self._streams[item.job_id] = JobStream(item.job_id, item.attempt, item.tokens)
                    stream.begin(out, item.revision, now_s)
                case _End():
                    ending = self._streams.pop(item.job_id, None)
                    if ending is not None:
                        ending.end(out, item.status)
                    tell_state(out, item.job_id, item.attempt, item.status)
                case _Save():
                    saved = self._streams.get(item.job_id)
                    if saved is not None:
                        saved.save(out)
                case _Drop():
                    self._streams.pop(item.job_id, None)
                case _Result():
                    try:
                        item.compose(out)
                    except Exception:
                        log.exception("a Celery result can't be stored")
                case _:
                    self._metrics.step(item)
                    for delta in item:
                        told = self._streams.get(delta.request_id)
                        if told is not None:
                            told.tokens(out, delta, now_s)
        return out


def _send(out: Outgoing, client: redis.Redis) -> None:
    """Raise a RedisError unless Redis took it; what it will never take is left out."""
    for answer in out.send(client):
        if isinstance(answer, (OutOfMemoryError, ReadOnlyError)):
            raise answer
        if isinstance(answer, Exception):
            log.error("Redis refused an event or a result: %s", answer)
