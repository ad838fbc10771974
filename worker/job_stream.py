"""What is told on Redis of one attempt at a job: its event stream, and where another worker could go on from."""

from __future__ import annotations

from typing import Any

import redis
from headrace.contract import JobStatus
from headrace.events import StateEvent, TokenEvent
from headrace.wire import DONE_CHANNEL, STREAM_TTL_S, progress_key, stream_key

from engine.request import TokenDelta
from worker.result import shown_logprob

RENEWALS = 6
"""How often, in its time to live, that of a stream that still grows is set again."""
SAVE_S = 1.0
"""How often the tokens of a job that doesn't stream are put where a worker that takes it over finds them."""


class Outgoing:
    """Commands for Redis, composed once and sent until Redis takes them: readers skip what comes twice.

    Streams live for `ttl_s` seconds after their last event.
    """

    def __init__(self, ttl_s: int = STREAM_TTL_S) -> None:
        self.ttl_s = ttl_s
        self._commands: list[tuple[str | bytes | int, ...]] = []
        self._ended: list[str] = []

    def append(self, key: str, event: StateEvent | TokenEvent) -> None:
        self._commands.append(("XADD", key, "*", "event", event.model_dump_json(exclude_none=True)))

    def expire(self, key: str) -> None:
        self._commands.append(("EXPIRE", key, self.ttl_s))

    def delete(self, key: str) -> None:
        self._commands.append(("DEL", key))

    def result(self, key: str, value: bytes | str, ttl_s: int, anew: bool) -> None:
        """A Celery result, as its backend would store it; `anew` if none that is there is to be replaced."""
        self._commands.append(("SET", key, value, "EX", ttl_s, *(["NX"] if anew else [])))
        self._commands.append(("PUBLISH", key, value))

    def publish_end(self, job_id: str) -> None:
        self._ended.append(job_id)

    def send(self, client: redis.Redis) -> list[Any]:
        """What Redis answered to each command, in one round trip; last of all everybody hears who has ended.

        Much is sent and none of it read: a pipeline of redis-py would take most of its time to look after answers.
        """
        commands = self._commands
        if self._ended:
            commands = [*commands, ("PUBLISH", DONE_CHANNEL, " ".join(self._ended))]
        pool = client.connection_pool
        connection: Any = pool.get_connection()
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            return [_answer(connection) for _ in commands]
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as refusal:
        return refusal


class JobStream:
    """One attempt that runs here. If readers want no tokens, those that there are go to a stream of their own."""

    def __init__(self, job_id: str, attempt: int, streams: bool) -> None:
        self._job_id = job_id
        self._attempt = attempt
        self._streams = streams
        self._key = stream_key(job_id) if streams else progress_key(job_id)
        self._running: StateEvent | None = None
        """What a stream of the attempt's own begins with, once there is something to be saved."""
        self._renewed_s = 0.0
        self._saved_s = 0.0
        self._unsaved: dict[int, TokenEvent] = {}
        """By completion, if readers want no tokens: what came since it was last saved."""
        self._tails: list[TokenEvent] = []
        """Text that the engine held back until the attempt ended. It is the job's only if the attempt is."""

    def begin(self, out: Outgoing, revision: str, now_s: float) -> None:
        self._running = StateEvent(status=JobStatus.RUNNING, attempt=self._attempt, revision=revision)
        out.append(stream_key(self._job_id), self._running)
        out.expire(stream_key(self._job_id))
        self._renewed_s = self._saved_s = now_s

    def tokens(self, out: Outgoing, delta: TokenDelta, now_s: float) -> None:
        """What one step brought."""
        if self._streams:
            event = self._event(delta)
            if delta.token_ids:
                out.append(self._key, event)
            else:
                self._tails.append(event)
        else:
            self._gather(delta)
            if now_s - self._saved_s >= SAVE_S:
                self.save(out)
                self._saved_s = now_s
        if now_s - self._renewed_s > out.ttl_s / RENEWALS:
            self._renewed_s = now_s
            out.expire(self._key)

    def save(self, out: Outgoing) -> None:
        """Put down all that there is, so that another worker can go on from it."""
        if self._unsaved and self._running is not None:
            out.append(self._key, self._running)
            out.expire(self._key)
            self._running = None
        for event in self._unsaved.values():
            out.append(self._key, event)
        self._unsaved.clear()

    def end(self, out: Outgoing, status: JobStatus) -> None:
        if status.terminal:
            for tail in self._tails:
                out.append(self._key, tail)
            if not self._streams:
                out.delete(self._key)  # whoever handed the job back may have saved something

    def _gather(self, delta: TokenDelta) -> None:
        """Add to what is to be saved; what comes after a gap is of no use."""
        known = self._unsaved.get(delta.index)
        if not delta.token_ids:
            return
        if known is None:
            self._unsaved[delta.index] = self._event(delta)
        elif known.position is not None and known.position + len(known.token_ids) == delta.position:
            known.token_ids += delta.token_ids
            known.text += delta.text
            if delta.logprobs:
                known.logprobs = [*(known.logprobs or ()), *map(shown_logprob, delta.logprobs)]

    def _event(self, delta: TokenDelta) -> TokenEvent:
        return TokenEvent(
            attempt=self._attempt,
            offset=delta.offset,
            text=delta.text,
            token_ids=list(delta.token_ids),
            index=delta.index,
            position=delta.position,
            logprobs=[shown_logprob(one) for one in delta.logprobs] or None,
        )


def tell_state(out: Outgoing, job_id: str, attempt: int, status: JobStatus) -> None:
    """The job entered a state."""
    out.append(stream_key(job_id), StateEvent(status=status, attempt=attempt))
    out.expire(stream_key(job_id))
    if status.terminal:
        out.publish_end(job_id)
