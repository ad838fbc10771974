"""What the ledger does for its callers, as one protocol, and the values that cross its boundary.

Every method is synchronous, thread-safe and one transaction. The database's clock is the only clock:
leases, deadlines and times of day are computed in SQL, so hosts may disagree. Transient failures
(serialisation, deadlock, a lost connection before commit) are retried inside; `LedgerUnavailable`
is raised when the database can't be reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from headrace.contract import Job, JobPage, JobRequest, JobResult, JobStatus, ModelCard, Reason, Timings


class LedgerUnavailable(RuntimeError):
    """The database can't be reached now. Nothing was written; the call may be repeated."""


class LedgerMissing(LedgerUnavailable):
    """The database has no tables yet."""


class IdempotencyConflict(ValueError):
    """The idempotency key was used before with another body."""


class IllegalTransition(ValueError):
    """The job's state doesn't allow it."""


@dataclass(frozen=True, slots=True)
class Submission:
    """`created` is False if the idempotency key named an existing job."""

    job: Job
    created: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write a job's outcome: it holds while `fence` is the job's newest."""

    job_id: str
    owner: str
    fence: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A delivery that wants to run. `request` is given for a raw Celery message, which has no row yet.

    The job of a raw message counts as accepted when its id was made, if the id tells.
    """

    job_id: str
    request: JobRequest | None = None
    alone: bool = False
    """Whether the claimer runs nothing else and will run nothing else beside it."""


class Verdict(StrEnum):
    """What became of a claim."""

    RUN = "run"
    DUPLICATE = "duplicate"
    """Another live lease, or this very owner, holds it: drop the delivery."""
    TERMINAL = "terminal"
    """It has ended: drop the delivery."""
    ALONE = "alone"
    """All its attempts but one were lost with their workers: claim it again once it can run alone."""
    CANCELLED = "cancelled"
    """Cancellation was asked for before it ran; the claim has just ended it so."""
    EXPIRED = "expired"
    """Its deadline has passed; the claim has just ended it so."""
    DEAD = "dead"
    """Its attempts are used up; the claim has just ended it as `failed`, reason `dead_letter`."""
    UNKNOWN = "unknown"
    """No row, and no request in the message, or an id that can't be a job's."""


@dataclass(frozen=True, slots=True)
class ClaimResult:
    job_id: str
    verdict: Verdict
    lease: Lease | None = None
    request: JobRequest | None = None
    """For RUN: what to generate, its seed filled in."""
    queued_s: float = 0.0
    """For RUN: seconds since the job was accepted, on the ledger's clock."""
    remaining_s: float | None = None
    """For RUN: seconds to the deadline."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ends. `status` is terminal; a partial result may stand beside an error."""

    lease: Lease
    status: JobStatus
    result: JobResult | None = None
    reason: Reason | None = None
    message: str | None = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Renewal:
    lost: frozenset[str]
    """Jobs whose lease is another's by now: stop them and write nothing."""
    cancelled: frozenset[str]
    """Jobs whose cancellation was asked for."""


@dataclass(frozen=True, slots=True)
class Loss:
    """An attempt that ended with its worker: the lease ran out."""

    attempt: int
    worker: str
    lost_at: datetime
    companions: int
    """Other jobs that the same worker lost."""
    started_at: datetime | None = None


class Topic(StrEnum):
    """What an outbox row asks the relay to send."""

    PUBLISH = "publish"
    REVOKE = "revoke"


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One outbox row."""

    id: int
    topic: Topic
    job_id: str
    model: str
    priority: str
    fence: int = 0
    """For a revoke: the fence of the attempt that is to end. A later one was asked for after the cancellation."""
    traceparent: str | None = None
    """Of the span that asked for the job."""


@dataclass(frozen=True, slots=True)
class Windows:
    """How much of the queue the broker is given; the rest waits in the ledger, where tenants take turns."""

    jobs: int = 128
    """Messages of one model and class of priority that the broker may hold unclaimed."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of tenants; 1 for those not named."""


DEFAULT_WINDOWS = Windows()


@dataclass(frozen=True, slots=True)
class Retention:
    """How long what has ended is kept, in seconds; None keeps it for good."""

    jobs_s: float | None = None
    """Jobs with their results, events and idempotency keys."""
    dead_letters_s: float | None = None
    keys_s: float | None = None
    """API keys that were revoked, or have run out."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """How many of each kind."""

    jobs: int = 0
    dead_letters: int = 0
    keys: int = 0
    revocations: int = 0


@dataclass(frozen=True, slots=True)
class Backlog:
    """What one tenant has waiting for one model."""

    jobs: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Drain:
    """How fast jobs of one model end, going by the newest of them."""

    jobs_per_s: float = 0.0
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobFilter:
    status: JobStatus | None = None
    model: str | None = None
    tenant: str | None = None
    after: str | None = None
    limit: int = 20
    reason: Reason | None = None
    ended_before_s: float | None = None
    """Only jobs that ended at least so long ago."""


class LedgerProtocol(Protocol):
    """`ledger.Ledger(url)` is the implementation, for SQLite (WAL) and PostgreSQL."""

    # -- the door ------------------------------------------------------------------------------
    def submit(self, request: JobRequest, job_id: str | None = None, tokens: int | None = None) -> Submission:
        """Write the job as `queued` and its outbox row, in one transaction; draw the seed if there is none.

        `tokens`, which the job may take at most, are guessed from the prompt's length if nobody has counted.

        Raises IdempotencyConflict, also for an id that is another request's, and ValueError for a deadline in the
        past.
        """
        ...

    def submit_many(self, requests: Sequence[JobRequest]) -> list[Submission]:
        """Write many jobs as `submit` does, a thousand in each transaction.

        Raises what `submit` raises; of the thousand that it was in, none is written then.
        """
        ...

    def get(self, job_id: str, tenant: str | None = None) -> Job | None: ...

    def jobs(self, job_ids: Sequence[str]) -> dict[str, Job]:
        """Those of the jobs that there are, by id."""
        ...

    def ended(self, job_ids: Sequence[str]) -> frozenset[str]:
        """Those of the jobs that have ended."""
        ...

    def page(self, where: JobFilter) -> JobPage:
        """Newest first; `after` is the last id of the page before. Raises ValueError if there is no such job."""
        ...

    def request_cancel(self, job_ids: Sequence[str]) -> dict[str, Job]:
        """Queued jobs end as `cancelled` at once. Running ones are marked, and a REVOKE row goes to the outbox;
        they end when their worker has let go. Ended ones stay as they are. Unknown ids are left out."""
        ...

    def revoke(self, job_ids: Sequence[str]) -> None:
        """Remember these ids, if no job has them, for a day: the raw message that brings one ends as `cancelled`."""
        ...

    def retry(self, job_id: str) -> Job:
        """An ended job that did not succeed is `queued` again, its attempts at 0 and its `ttl_s` begun anew.

        Raises IllegalTransition, also for a deadline in the past and for what never was a valid request; KeyError
        for an unknown id.
        """
        ...

    def purge(self, job_id: str, tenant: str | None = None) -> bool:
        """Delete a dead letter with all that is kept of it; False if there is none of this id."""
        ...

    def counts(self, tenant: str | None = None) -> dict[str, dict[JobStatus, int]]:
        """Jobs by model and status, terminal states included; of one tenant, if it is named."""
        ...

    def submitted(self, tenant: str, idempotency_key: str) -> bool:
        """Whether a job of this tenant has the key."""
        ...

    def backlog(self, tenant: str | None = None) -> dict[tuple[str, str], Backlog]:
        """What is queued, by model and tenant; of one tenant, if it is given."""
        ...

    def drains(self, models: Sequence[str]) -> dict[str, Drain]:
        """How fast jobs of these models end now."""
        ...

    # -- models --------------------------------------------------------------------------------
    def register_model(self, card: ModelCard, text_bundle: bytes) -> None:
        """Insert or replace. `text_bundle` is `text.bundle.TextBundle.to_bytes()`."""
        ...

    def models(self) -> dict[str, ModelCard]: ...

    def text_bundle(self, model: str) -> bytes | None: ...

    # -- the worker ----------------------------------------------------------------------------
    def claim(self, claims: Sequence[Claim], owner: str, lease_s: float) -> list[ClaimResult]:
        """Decide each delivery, in order. RUN raises `attempt` and `fence` and sets `lease_until`. An expired
        lease is claimable. ALONE changes nothing. A raw message's row is written first, under its own id; if its
        idempotency key is another job's, it is TERMINAL, written as a failed job that names the other."""
        ...

    def renew(self, leases: Sequence[Lease], lease_s: float) -> Renewal: ...

    def commit(self, outcomes: Sequence[Outcome]) -> list[bool]:
        """Result, timings and terminal state in one transaction, each guarded by its fence. False: the lease was
        lost (or the outcome is there already, written by a commit whose answer got lost: then True).

        The ledger fills in the timings that are its own, `attempts` and `total_time_ms`. Raises ValueError for what
        is no outcome: a success has a result, a failure a reason.
        """
        ...

    def record(self, outcomes: Sequence[Outcome]) -> list[Job | None]:
        """`commit`, and the jobs as they have ended; None where `commit` says False."""
        ...

    def release(self, leases: Sequence[Lease]) -> list[bool]:
        """Hand jobs back: `queued` again, the attempt uncounted, an outbox row to publish them at once. One whose
        cancellation was asked for ends as `cancelled`. False: the lease was lost, or the job has ended."""
        ...

    def reject(
        self, job_id: str, model: str, reason: Reason, message: str, raw: str, traceparent: str | None = None
    ) -> None:
        """Record a malformed raw message as a `failed` job (no-op if the id exists)."""
        ...

    # -- the relay -----------------------------------------------------------------------------
    def outbox(self, limit: int, windows: Windows = DEFAULT_WINDOWS) -> list[Dispatch]:
        """The rows whose turn it is: revocations, and jobs as far as the windows have room, fairly between tenants.

        For a few seconds they are this caller's alone, then due again unless they were reported `sent`. Sending is at
        least once; the claim drops doubles.
        """
        ...

    def revocations(self, limit: int) -> list[Dispatch]:
        """The revocations among those rows, without taking them: they can't wait for anybody's turn to write."""
        ...

    def sent(self, ids: Sequence[int]) -> None:
        """The broker has taken these: revocations are done with, jobs wait in its windows until they are claimed."""
        ...

    def raise_aged(self, aging_s: float, windows: Windows = DEFAULT_WINDOWS) -> int:
        """Have jobs that the broker has held unclaimed for `aging_s` sent again in the first class, a few at a time.
        Returns how many."""
        ...

    def reap(self, limit: int = 500) -> int:
        """End or requeue what nobody holds: running with an expired lease (cancelled if that was asked for,
        `failed`/`dead_letter` past `max_attempts`, else `queued` with an outbox row), and queued past its deadline."""
        ...

    def stale_leases(self, for_s: float) -> int:
        """How many running jobs have had no live lease for `for_s` seconds."""
        ...

    def prune(self, retention: Retention, limit: int = 500) -> Pruned:
        """Forget what ended long enough ago, at most `limit` of each kind; nothing that waits or runs."""
        ...

    def expired(self, retention: Retention) -> Pruned:
        """How much `prune` would remove, without a limit."""
        ...

    def queued(self, model: str, older_than_s: float, limit: int) -> list[Dispatch]:
        """Queued jobs whose message was sent a while ago; `Dispatch.id` is 0."""
        ...

    def sent_counts(self) -> dict[str, dict[JobStatus, int]]:
        """Queued and running jobs by model and status whose message the broker should hold. Cheap, however many jobs
        have ended, or wait to be sent."""
        ...

    def republish(self, job_ids: Sequence[str]) -> int:
        """Have a message sent for each of these jobs that is still queued, unless one is to be sent already."""
        ...

    def elect(self, role: str, owner: str, ttl_s: float) -> bool:
        """Become or stay the one process that has `role` for the next `ttl_s`."""
        ...

    def revision(self) -> tuple[str | None, str]:
        """Alembic revision of the database, and the one that this code needs."""
        ...

    def losses(self, job_id: str) -> list[Loss]:
        """The attempts at a job that were lost with their workers, oldest first, those before a retry included."""
        ...

    def now(self) -> datetime:
        """The database's clock."""
        ...

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken: terminal and a result or an error, lease iff running,
        a place in the queue iff queued, attempts within bounds."""
        ...

    def close(self) -> None: ...
