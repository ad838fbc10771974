"""Reads a job's server-sent events, without I/O: what to request, what the bytes mean, when to reconnect."""

from __future__ import annotations

import time

from pydantic import ValidationError

from headrace.contract import Job, JobStatus
from headrace.errors import ConnectionFailed, HeadraceError, JobFailed
from headrace.events import StateEvent, TokenEvent, job_event
from headrace.flows import Send, job_path
from headrace.waits import Backoff, Deadline

KEEPALIVE_S = 15.0
"""The server writes something at least this often."""
OUTAGE_S = 60.0
"""How long a server may be away before a reader gives up: longer than it takes to restart one."""


class EventDecoder:
    """Bytes of `text/event-stream` to (id, data) pairs; `id` is None for an event that has none."""

    def __init__(self) -> None:
        self._rest = b""
        self._id: str | None = None
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[tuple[str | None, str]]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for raw in lines:
            name, _, value = raw.removesuffix(b"\r").decode(errors="replace").partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                self._data.append(value)
            elif name == "id":
                self._id = value
            elif not name and not value and self._data:
                events.append((self._id, "\n".join(self._data)))
                self._id, self._data = None, []
        return events


class EventReader:
    """Follows one job over as many connections as it takes."""

    def __init__(self, job_id: str, timeout_s: float | None) -> None:
        self.done = False
        self._job_id = job_id
        self._last_id: str | None = None
        self._deadline = Deadline(timeout_s)
        self._backoff = Backoff()
        self._lost_s: float | None = None
        self._decoder = EventDecoder()

    def request(self) -> Send:
        """The next connection's request. Two keep-alives that don't come end a connection."""
        self._decoder = EventDecoder()
        headers = {"Accept": "text/event-stream"}
        if self._last_id is not None:
            headers["Last-Event-ID"] = self._last_id
        silence_s = min(2 * KEEPALIVE_S, max(self._deadline.left_s(), 0.001))
        return Send("GET", job_path(self._job_id, "/events"), headers=headers, silence_s=silence_s)

    def feed(self, chunk: bytes) -> list[StateEvent | TokenEvent]:
        """The events that `chunk` completes; after a terminal one `done` is True."""
        if self._deadline.left_s() == 0:
            raise self._deadline.error(self._job_id, None)
        self._lost_s = None
        events = []
        for event_id, data in self._decoder.feed(chunk):
            try:
                event = job_event.validate_json(data)
            except ValidationError as error:
                raise HeadraceError(f"job {self._job_id}: an event that this version does not know: {error}") from error
            self._last_id = event_id or self._last_id
            self._backoff.reset()
            events.append(event)
            if isinstance(event, StateEvent) and event.status.terminal:
                self.done = True
                break
        return events

    def pause_s(self) -> float:
        """How long to wait before the next connection, after one was lost; raises JobTimeout or ConnectionFailed."""
        if self._deadline.left_s() == 0:
            raise self._deadline.error(self._job_id, None)
        now_s = time.monotonic()
        if self._lost_s is None:
            self._lost_s = now_s
        if (silent_s := now_s - self._lost_s) > OUTAGE_S:
            raise ConnectionFailed(f"nothing was heard of job {self._job_id} for {silent_s:.0f} s; it goes on")
        return min(self._backoff.delay_s(), self._deadline.left_s())


class TextReader:
    """Turns events into the text that is new, over restarts of attempts and connections.

    Of a job with several completions it is the first one's.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._text: list[str] = []
        self._chars = 0

    def take(self, event: StateEvent | TokenEvent) -> str:
        """The characters that `event` adds; raises JobFailed for an end without success.

        After a gap nothing is new until the terminal event, which has the whole text. Raises HeadraceError if the job
        was begun anew and has another text now (its worker has another revision of the model).
        """
        if isinstance(event, TokenEvent):
            if event.index or event.offset > self._chars:
                return ""
            known = self._chars - event.offset
            if event.text[:known] != self._shown()[event.offset : event.offset + len(event.text)]:
                raise self._changed()
            return self._add(event.text[known:])
        if not event.status.terminal:
            return ""
        return self._add(self._rest(event.job)) if event.job is not None else ""

    def _add(self, text: str) -> str:
        if text:
            self._text.append(text)
            self._chars += len(text)
        return text

    def _rest(self, job: Job) -> str:
        if job.status is not JobStatus.SUCCEEDED or job.result is None:
            raise JobFailed(job)
        if not job.result.text.startswith(self._shown()):
            raise self._changed()
        return job.result.text[self._chars :]

    def _shown(self) -> str:
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    def _changed(self) -> HeadraceError:
        return HeadraceError(f"job {self._job_id}: its text is not the one that was streamed; get() has the right one")
