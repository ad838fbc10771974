"""What Celery must not be given."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from worker import consumer
from worker.consumer import fault

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
