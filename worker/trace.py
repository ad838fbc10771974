"""What Celery's tracer makes of a job that nothing follows and that nobody listens to, without its machinery."""

from __future__ import annotations

import time
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import signals
from celery.exceptions import Ignore

from worker.failures import JobFailed
from worker.slot import Slot

Traced = tuple[bool, Any, float]
"""Whether it failed, its value in words or what went wrong, and how many seconds it took."""
_HEARD = (signals.task_prerun, signals.task_postrun, signals.task_success, signals.task_failure)


def is_heard() -> bool:
    """Whether somebody listens to Celery's signals about tasks, as tools for tracing do: then its tracer sends them."""
    return any(signal.receivers for signal in _HEARD)


def trace(slot: Slot) -> Traced:
    """Run the job's task in its greenlet."""
    message = slot.message
    began_s = time.monotonic()
    try:
        generation = message.task.run(*message.args, **message.kwargs)
    except (JobFailed, Ignore):
        return True, ExceptionInfo(), 0.0
    return False, repr(generation), time.monotonic() - began_s
