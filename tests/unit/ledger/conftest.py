"""A way to reach behind the ledger, and what its tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import sqlalchemy as sa
from headrace.contract import JobRequest, JobResult, JobStatus, Reason, Usage

from ledger import Ledger
from ledger.contract import Claim, Lease, Outcome, Verdict
from ledger.database import make_engine

Sql = Callable[..., Sequence[Any]]


@pytest.fixture
def sql(migrated_url: str) -> Iterator[Sql]:
    """Run one statement in a transaction of its own; returns its rows."""
    engine = make_engine(migrated_url)

    def run(statement: str, **parameters: Any) -> Sequence[Any]:
        with engine.begin() as connection:
            result = connection.execute(sa.text(statement), parameters)
            return result.all() if result.returns_rows else []

    yield run
    engine.dispose()


class Desk:
    """Short ways to the states that tests start from."""

    def __init__(self, ledger: Ledger, sql: Sql) -> None:
        self.ledger = ledger
        self.sql = sql

    def queued(self, **fields: Any) -> str:
        return self.ledger.submit(JobRequest(**{"model": "m", "prompt": "hello"} | fields)).job.id

    def running(self, owner: str = "w1", lease_s: float = 30, **fields: Any) -> Lease:
        return self.claimed(self.queued(**fields), owner, lease_s)

    def claimed(self, job_id: str, owner: str = "w1", lease_s: float = 30) -> Lease:
        [result] = self.ledger.claim([Claim(job_id, alone=True)], owner, lease_s)
        assert result.verdict is Verdict.RUN
        assert result.lease is not None
        return result.lease

    def verdict(self, job_id: str, owner: str = "w2") -> Verdict:
        return self.ledger.claim([Claim(job_id)], owner, 30)[0].verdict

    def succeeded(self, **fields: Any) -> str:
        lease = self.running(**fields)
        assert self.ledger.commit([success(lease)]) == [True]
        return lease.job_id

    def failed(self, **fields: Any) -> str:
        lease = self.running(**fields)
        assert self.ledger.commit([Outcome(lease, JobStatus.FAILED, reason=Reason.ENGINE_ERROR, message="no")]) == [
            True
        ]
        return lease.job_id

    def lapse(self, *job_ids: str) -> None:
        """Let the leases of these jobs run out."""
        for job_id in job_ids:
            self.sql("UPDATE jobs SET lease_until = created_at WHERE id = :id AND status = 'running'", id=job_id)

    def overdue(self, job_id: str) -> None:
        """Let the deadline of this job pass."""
        self.sql("UPDATE jobs SET deadline = created_at WHERE id = :id", id=job_id)

    def status(self, job_id: str) -> JobStatus:
        job = self.ledger.get(job_id)
        assert job is not None
        return job.status

    def topics(self, job_id: str) -> list[str]:
        """What the outbox is to send about a job, held rows included."""
        unsent = "SELECT topic FROM outbox WHERE job_id = :id AND sent_at IS NULL ORDER BY id"
        return [row.topic for row in self.sql(unsent, id=job_id)]


def success(lease: Lease, text: str = "Hi.") -> Outcome:
    usage = Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5)
    result = JobResult(text=text, token_ids=[7, 8], finish_reason="stop", usage=usage)
    return Outcome(lease, JobStatus.SUCCEEDED, result)


@pytest.fixture
def desk(ledger: Ledger, sql: Sql) -> Desk:
    return Desk(ledger, sql)


@pytest.fixture
def succeed() -> Callable[..., Outcome]:
    """A successful outcome for a lease."""
    return success
