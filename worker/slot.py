"""A place in the pool: one job, its greenlet on the hub thread, and the message that it will acknowledge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from greenlet import getcurrent, greenlet
from headrace.tracing import named

if TYPE_CHECKING:
    from engine.request import EngineRequest, RequestOutput
    from worker.message import JobMessage
    from worker.pool import EnginePool
    from worker.services import Services

P = TypeVar("P")
T = TypeVar("T")


class Cause(StrEnum):
    """Why a job is stopped before its own end."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"
    TIME_LIMIT = "time_limit"
    HAND_BACK = "hand_back"
    """The worker is leaving: the job is queued again."""
    LOST = "lost"
    """Another worker holds the lease by now: nothing may be written."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop that was asked for; the first one counts, but a lost lease always wins."""

    cause: Cause
    message: str
    asked_s: float
    """On the monotonic clock."""


class Slot:
    """One delivery that is being worked on. Lives on the hub thread only."""

    def __init__(self, pool: EnginePool, pid: int, message: JobMessage) -> None:
        self.pool = pool
        self.pid = pid
        self.task_id: str = message.id
        self.message = message
        self.job_id: str | None = None
        """Known once the claim was granted; equal to the task's id in all but odd messages."""
        self.traceparent: str | None = message.traceparent
        """The message's, and the job's own once the claim was granted."""
        self.fence: int | None = None
        """That of its lease, known from then on."""
        self.cancelled_fence: int | None = None
        """The newest attempt whose cancellation was heard of."""
        self.in_engine = False
        self.accepted = False
        self.recorded = False
        """Whether the ledger has its outcome: what is left is to tell it."""
        self.stop: Stop | None = None
        self.timers: list[Any] = []
        self.greenlet: Any = None
        self._ticket: object | None = None

    @property
    def services(self) -> Services:
        return self.pool.services

    @property
    def named(self) -> str:
        """The job as the log names it."""
        return named(self.job_id or self.task_id, self.traceparent)

    def begin(self, body: Callable[[], None]) -> None:
        """Run `body` in a greenlet of the slot's own until it parks for the first time."""
        self.greenlet = _JobGreenlet(body)
        self.greenlet.slot = self
        self.greenlet.switch()

    @overload
    def park(self, start: Callable[[P, Callable[[T | Exception], None]], None], what: P) -> T: ...

    @overload
    def park(
        self, start: Callable[[P, Callable[[T | Exception], None]], None], what: P, *, within_s: float
    ) -> T | None: ...

    def park(
        self,
        start: Callable[[P, Callable[[T | Exception], None]], None],
        what: P,
        *,
        within_s: float | None = None,
    ) -> T | None:
        """Begin `start(what, done)` and suspend the job until somebody calls `done`, from any thread.

        What `done` is given is returned, or raised if it is an exception; None after `within_s` without it.
        """
        ticket = self._ticket = object()
        if within_s is not None:
            self.timers.append(self.pool.after(within_s, lambda: self._resume(ticket, None)))
        start(what, lambda value: self.pool.post(self._resume, ticket, value))
        value = self.greenlet.parent.switch()
        if isinstance(value, Exception):
            raise value
        return cast("T", value)

    def generate(self, request: EngineRequest) -> RequestOutput:
        """Park until the engine is done with the request, in whatever way."""
        self.in_engine = True
        try:
            return self.park(self.pool.enter, request)
        finally:
            self.in_engine = False

    def _resume(self, ticket: object, value: object) -> None:
        if self._ticket is ticket:
            self._ticket = None
            self.greenlet.switch(value)

    def terminate(self, signal: Any = None) -> None:
        """Celery calls this on what `on_apply` returned; `JobMessage.terminate` has done the work already."""

    def release_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()


class _JobGreenlet(greenlet):  # type: ignore[misc]  # greenlet's types are not followed
    slot: Slot


def current_slot() -> Slot:
    """The slot of the job whose task body calls this."""
    slot = getattr(getcurrent(), "slot", None)
    if slot is None:
        raise RuntimeError(
            "headrace tasks run in the engine pool only: start `celery -A worker.app worker` without `-P`"
        )
    return cast("Slot", slot)
