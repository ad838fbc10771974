"""How a delivery can end other than by a result. The tracer and `worker.message` turn these into Celery's states."""

from __future__ import annotations

from celery.exceptions import Ignore
from headrace.contract import Reason


class JobFailed(Exception):
    """The job ended without succeeding: FAILURE in Celery, and `reason: message` in its event and in the log."""

    @classmethod
    def because(cls, reason: Reason, message: str) -> JobFailed:
        return cls(f"{reason.value}: {message}")


class Dropped(Ignore):  # type: ignore[misc]  # Celery has no types
    """The delivery is a duplicate, or the lease was lost: acknowledge it and record nothing."""


class Revoked(Ignore):  # type: ignore[misc]  # Celery has no types
    """The job was cancelled, and the ledger says so: announce REVOKED and acknowledge."""


class HandedBack(Ignore):  # type: ignore[misc]  # Celery has no types
    """The job is queued again: put the message back at once, for another worker."""


class Malformed(ValueError):
    """The message can't be turned into a job."""

    def __init__(self, reason: Reason, message: str, model: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.model = model
