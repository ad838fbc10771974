"""What `worker.writer` is asked to write, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Generic, TypeVar

from headrace.contract import Job, Reason

from ledger.contract import Claim, ClaimResult, Lease, Outcome
from worker.draft import Draft

A = TypeVar("A")
R = TypeVar("R")
Done = Callable[[R | Exception], None]
"""Called on the writer's thread with the answer, or with what went wrong."""


@dataclass(slots=True)
class Order(Generic[A, R]):
    """Something to write, and whom to tell."""

    what: A
    done: Done[R]


@dataclass(frozen=True, slots=True)
class Rejection:
    """A raw message that is no job."""

    job_id: str
    model: str
    reason: Reason
    message: str
    raw: str
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class Cancellation:
    """A revoke that reached this worker. `running` says whether it means jobs that have started, too."""

    job_ids: tuple[str, ...]
    running: bool


@dataclass(frozen=True, slots=True)
class Recorded:
    """An outcome that was written, and the job as the ledger shows it with it."""

    outcome: Outcome
    job: Job


@dataclass(slots=True)
class Backlog:
    """What is to be written, by kind, in the order in which the kinds are written."""

    commits: list[Order[Draft, Recorded | None]] = field(default_factory=list)
    releases: list[Order[Lease, bool]] = field(default_factory=list)
    rejections: list[Order[Rejection, None]] = field(default_factory=list)
    cancellations: list[Cancellation] = field(default_factory=list)
    claims: list[Order[Claim, ClaimResult]] = field(default_factory=list)
    lookups: list[Order[str, Job | None]] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(getattr(self, kind.name)) for kind in fields(self))
