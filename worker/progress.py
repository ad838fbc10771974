"""Where a job that comes from another worker goes on: what that one told on Redis, read back.

An attempt tells its model's revision first, then every token in order; one that itself went on from
others repeats theirs. So the attempt that got farthest says all, if its model was ours. What is
missing, torn or of another model only costs that it is computed again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import redis
from celery.utils.log import get_logger
from headrace.contract import JobStatus, TokenLogprob
from headrace.counting import counted
from headrace.events import StateEvent, TokenEvent, job_event
from headrace.wire import progress_key, stream_key
from pydantic import ValidationError

from engine import request as engine
from engine.request import Progress

log = get_logger(__name__)

PATIENCE_S = 2.0
"""How long Redis may take to answer before the jobs that wait for it begin anew."""

Entry = tuple[float, StateEvent | TokenEvent]
"""When it was told, on this process's monotonic clock, and what."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a job has already."""

    progress: tuple[Progress, ...]
    began_s: float
    """When its first attempt began, on this process's monotonic clock."""
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Question:
    job_id: str
    streams: bool
    """Whether the job publishes its tokens: they are in its event stream then."""
    revision: str


@dataclass(slots=True)
class _Attempt:
    revision: str | None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)

    def take(self, event: TokenEvent) -> None:
        """Add the tokens that go on without a gap."""
        tokens = self.tokens.setdefault(event.index, [])
        if event.position is None or event.position > len(tokens):
            return
        new = len(tokens) - event.position
        tokens += event.token_ids[new:]
        if event.logprobs is not None:
            self.logprobs.setdefault(event.index, []).extend(event.logprobs[new:])

    def progress(self) -> tuple[Progress, ...]:
        return tuple(
            Progress(tuple(tokens), tuple(map(_logprob, self.logprobs.get(index, ()))), index)
            for index, tokens in sorted(self.tokens.items())
            if tokens
        )


def found_in(entries: Iterable[Entry], revision: str) -> Found | None:
    """What the attempts since the job's last end got to with this model; None if that is nothing."""
    attempts: dict[int, _Attempt] = {}
    farthest: list[_Attempt] = []
    began_s = first_token_s = None
    for at_s, event in entries:
        if isinstance(event, StateEvent):
            if event.status.terminal:
                attempts, farthest, began_s, first_token_s = {}, [], None, None
            elif event.status is JobStatus.RUNNING:
                attempts[event.attempt] = _Attempt(event.revision)
                farthest.append(attempts[event.attempt])
                began_s = at_s if began_s is None else began_s
        elif event.attempt in attempts:
            attempts[event.attempt].take(event)
            first_token_s = at_s if first_token_s is None else first_token_s
    told = [attempt.progress() for attempt in farthest if attempt.revision == revision]
    best = max(told, key=lambda progress: sum(len(one.token_ids) for one in progress), default=())
    if not best or began_s is None or first_token_s is None:
        return None
    return Found(best, began_s, first_token_s)


class ProgressReader(threading.Thread):
    """Asks Redis, for all who wait at once, on a thread of its own."""

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(name="headrace-progress", daemon=True)
        self._client = client
        self._inbox: queue.SimpleQueue[tuple[Question, Callable[[Found | None], None]] | None] = queue.SimpleQueue()

    def read(self, question: Question, done: Callable[[Found | None], None]) -> None:
        """Call `done` with what the job has already, None if that is nothing or can't be known now."""
        self._inbox.put((question, done))

    def stop(self) -> None:
        self._inbox.put(None)
        self.join(2 * PATIENCE_S)
        self._client.close()

    def run(self) -> None:
        leaving = False
        while not leaving:
            taken = [self._inbox.get()]
            while not self._inbox.empty():
                taken.append(self._inbox.get())
            asked = [one for one in taken if one is not None]
            leaving = len(asked) < len(taken)
            for (_, done), answer in zip(asked, self._answers([question for question, _ in asked]), strict=True):
                done(answer)

    def _answers(self, questions: list[Question]) -> list[Found | None]:
        if not questions:
            return []
        try:
            with self._client.pipeline(transaction=False) as pipe:
                pipe.time()
                for one in questions:
                    pipe.xrange(stream_key(one.job_id) if one.streams else progress_key(one.job_id))
                (seconds, micros), *streams = pipe.execute()
        except redis.RedisError as exc:
            begin = counted(len(questions), "job begins", "jobs begin")
            log.warning("%s anew, as no progress can be read: %s", begin, exc)
            return [None] * len(questions)
        behind_s = time.monotonic() - (seconds + micros / 1e6)
        return [found_in(_entries(s, behind_s), q.revision) for s, q in zip(streams, questions, strict=True)]


def _entries(stream: Iterable[tuple[bytes, dict[bytes, bytes]]], behind_s: float) -> Iterable[Entry]:
    """A stream's events; `behind_s` is this process's monotonic clock less the broker's."""
    for entry_id, fields in stream:
        try:
            yield int(entry_id.split(b"-")[0]) / 1000 + behind_s, job_event.validate_json(fields[b"event"])
        except (ValidationError, KeyError, ValueError):
            continue


def _logprob(told: TokenLogprob) -> engine.TokenLogprob:
    top = tuple(engine.TopLogprob(one.token_id, one.token, bytes(one.bytes), one.logprob) for one in told.top)
    return engine.TokenLogprob(told.token_id, told.token, bytes(told.bytes), told.logprob, told.rank, top)
