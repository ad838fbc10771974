"""Celery's view of one delivery, bent in four places to the ledger's order of events.

Celery announces a revocation as soon as it is asked for, before the engine has let go and before the
ledger knows. Here a revocation is only noted; the job's own path ends it, and announces it then.
Prompts are kept out of events and `inspect`, whatever the producer put into its headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from billiard.common import TERM_SIGNAME
from billiard.einfo import ExceptionWithTraceback
from celery.exceptions import InvalidTaskError
from celery.platforms import signals as platform_signals
from celery.worker.request import Request
from celery.worker.state import task_ready
from headrace.tracing import TRACEPARENT, parsed

from worker.canvas import chained_ids
from worker.failures import HandedBack, Revoked
from worker.trace import Traced, is_heard, trace


@dataclass(frozen=True, slots=True)
class Revocation:
    """What Celery says about a revoked task, to be said once the job has ended."""

    reason: str
    terminated: bool
    signum: int | None
    expired: bool


class JobMessage(Request):  # type: ignore[misc]  # Celery has no types
    """One delivery of a job. `worker.pool` keeps it for as long as the job is here."""

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        if not isinstance(self.id, str) or not isinstance(self._kwargs, dict):
            raise InvalidTaskError("the task's id is text and its keyword arguments are a mapping")
        self.revocation: Revocation | None = None
        self.wants_result: bool = not self.ignore_result
        """Whether somebody may call `AsyncResult.get()`; `worker.telemetry` stores it, off the hub thread."""
        self._ignore_result = True
        self._argsrepr, self._kwargsrepr = "-", f"job {self.id}"
        self._request_dict.update(ignore_result=True, argsrepr=self._argsrepr, kwargsrepr=self._kwargsrepr)

    @property
    def delivery_tag(self) -> str:
        return str(self.message.delivery_tag)

    @property
    def traceparent(self) -> str | None:
        """Of the span that sent the message, if its headers tell."""
        return parsed(self._request_dict.get(TRACEPARENT))

    @property
    def chained_ids(self) -> list[str]:
        """The tasks that won't start unless this one succeeds."""
        _, _, embed = self._payload
        return list(chained_ids(embed or {}))

    @property
    def followed(self) -> bool:
        """Whether something is to be done after the job, which is Celery's to do."""
        _, _, embed = self._payload
        return any((embed or {}).values())

    def execute_using_pool(self, pool: Any, **options: Any) -> Any:
        if self.followed or is_heard():
            return super().execute_using_pool(pool, **options)
        self.revoked()
        return pool.take(self, trace)

    def on_success(self, traced: Traced, **options: Any) -> None:
        failed, value, runtime_s = traced
        if failed:
            super().on_success(traced, **options)
            return
        task_ready(self)
        self.acknowledge()
        self.send_event("task-succeeded", result=value, runtime=runtime_s)

    def info(self, safe: bool = False) -> dict[str, Any]:
        """What `inspect` shows: never the arguments themselves."""
        shown: dict[str, Any] = super().info(safe=True)
        return shown

    def revoked(self) -> bool:
        """Note a revocation or an expiry by Celery's own rules, and let the message through to end in the ledger."""
        if self.revocation is None:
            super().revoked()
        return False

    def forget_hearsay(self) -> None:
        """Drop a revocation that only this worker's memory knows of: the ledger has its own, and may have retried."""
        if self.revocation is not None and not (self.revocation.terminated or self.revocation.expired):
            self.revocation = None

    def terminate(self, pool: Any, signal: Any = None) -> None:
        self.note_termination(signal)
        pool.cancel(self.id)

    def note_termination(self, signal: Any = None) -> None:
        """Have the revocation announced as a termination, once the job has ended."""
        self._announce_revoked("terminated", True, platform_signals.signum(signal or TERM_SIGNAME), False)

    def _announce_revoked(self, reason: str, terminated: bool, signum: int | None, expired: bool) -> None:
        if self.revocation is None:
            self.revocation = Revocation(reason, terminated, signum, expired)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> None:
        exception = exc_info.exception
        if isinstance(exception, ExceptionWithTraceback):
            exc_info.exception = exception = exception.exc  # what the event is to show
        if isinstance(exception, HandedBack):
            task_ready(self)
            self.reject(requeue=True)
        elif isinstance(exception, Revoked):
            said = self.revocation or Revocation("revoked", False, None, False)
            super()._announce_revoked(said.reason, said.terminated, said.signum, said.expired)
        else:
            super().on_failure(exc_info, send_failed_event, return_ok)
