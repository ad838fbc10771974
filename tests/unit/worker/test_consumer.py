"""What Celery must not be given."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from kombu.asynchronous import Hub

from worker import consumer
from worker.consumer import EVENTS_S, JobConsumer, fault

NEXT = {"task": "x", "args": [], "kwargs": {}, "options": {"task_id": "a"}, "subtask_type": None}


def message(embed: dict[str, Any] | None = None, **headers: Any) -> SimpleNamespace:
    body = [[], {}, embed or {}]
    return SimpleNamespace(headers={"task": "headrace.generate", **headers}, body=json.dumps(body), payload=body)


def test_what_celery_writes_is_none() -> None:
    assert fault(message()) is None
    whole = {"callbacks": [NEXT], "errbacks": None, "chain": [NEXT, NEXT], "chord": NEXT}
    assert fault(message(whole, timelimit=[None, 3], shadow=None)) is None


def test_a_body_that_is_too_large_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "MAX_BODY_BYTES", 2**20)
    large = SimpleNamespace(headers={}, body="x" * (2**20 + 1))
    assert fault(large) == "the body is larger than 1 MiB"


class Worker:
    """A consumer whose hub the test turns, and how often its events were sent."""

    def __init__(self, *, leaving: bool) -> None:
        self.made = JobConsumer.__new__(JobConsumer)
        self.made.hub = self.hub = Hub()
        self.made.pool = SimpleNamespace(leaving=leaving)
        self.made.event_dispatcher = SimpleNamespace(flush=self._flushed)
        self.made._flush_events_promise = self.made._flush_events
        self.flushes = 0

    def _flushed(self) -> None:
        self.flushes += 1

    def buffer(self, events: int) -> None:
        for _ in range(events):
            self.made.on_send_event_buffered()

    def turn(self) -> None:
        self.hub.fire_timers()
        for call in self.hub._pop_ready():
            call()


def test_the_events_of_a_moment_are_sent_together() -> None:
    worker = Worker(leaving=False)
    worker.buffer(5)
    worker.turn()
    assert worker.flushes == 0
    time.sleep(EVENTS_S)
    worker.turn()
    assert worker.flushes == 1
    worker.buffer(5)
    time.sleep(EVENTS_S)
    worker.turn()
    assert worker.flushes == 2


def test_the_last_events_of_a_worker_that_leaves_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer.Consumer, "stop", lambda _: None)
    worker = Worker(leaving=False)
    worker.buffer(1)
    worker.made.stop()
    assert worker.flushes == 1
    worker = Worker(leaving=True)
    worker.buffer(1)
    worker.turn()
    assert worker.flushes == 1
