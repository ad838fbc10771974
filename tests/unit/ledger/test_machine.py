"""The real ledger against a small model of it, through every order of events that Hypothesis can think of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from headrace.contract import JobRequest, JobResult, JobStatus, Reason
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from ledger import Ledger, dispatches
from ledger.contract import Claim, IllegalTransition, JobFilter, Lease, Outcome, Topic, Verdict

QUEUED, RUNNING = JobStatus.QUEUED, JobStatus.RUNNING
OWNERS = ("w1", "w2", "w3", "w4")
RAW = "raw"
FEW = 3
"""Submitted jobs in one example, beside a raw one: much happens to each."""
END_STATES = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.EXPIRED)


@dataclass
class Modelled:
    """What should be true of one job."""

    max_attempts: int
    status: JobStatus = QUEUED
    attempt: int = 0
    holder: Lease | None = None
    lapsed: bool = False
    overdue: bool = False
    has_ttl: bool = False
    cancel: bool = False
    text: str | None = None
    releasable: Lease | None = None
    """The newest lease, as long as its release can be repeated."""
    committed: tuple[Lease, JobStatus] | None = None
    lost_with: list[str] = field(default_factory=list)
    """The workers with which its attempts were lost since it was accepted."""

    def end(self, status: JobStatus) -> None:
        self.status, self.holder, self.releasable = status, None, None

    def verdict(self, alone: bool = True) -> Verdict:
        if self.status.terminal:
            return Verdict.TERMINAL
        if self.status is RUNNING and not self.lapsed:
            return Verdict.DUPLICATE
        if self.cancel:
            return Verdict.CANCELLED
        if self.overdue:
            return Verdict.EXPIRED
        if self.attempt >= self.max_attempts:
            return Verdict.DEAD
        last = self.attempt > 0 and self.attempt + 1 >= self.max_attempts
        return Verdict.ALONE if last and not alone else Verdict.RUN


ENDED_BY = {
    Verdict.CANCELLED: JobStatus.CANCELLED,
    Verdict.EXPIRED: JobStatus.EXPIRED,
    Verdict.DEAD: JobStatus.FAILED,
}


def machine_over(ledger: Ledger, sql: Any) -> type[RuleBasedStateMachine]:
    """A machine whose examples all run on this ledger, emptied before each."""

    class LedgerMachine(RuleBasedStateMachine):
        ids = Bundle("ids")
        leases = Bundle("leases")

        def __init__(self) -> None:
            super().__init__()
            sql("DELETE FROM jobs")
            self.jobs: dict[str, Modelled] = {}
            self.losses: list[tuple[str, str]] = []
            """Job and worker of every lost attempt, in order."""

        def lose(self, job_id: str) -> None:
            job = self.jobs[job_id]
            assert job.holder is not None
            job.lost_with.append(job.holder.owner)
            self.losses.append((job_id, job.holder.owner))

        def clear_companions(self, dead: list[str]) -> None:
            """Those that were lost with a job which has just died of an attempt of its own get theirs back."""
            lost_with = Counter(worker for _, worker in self.losses)
            last = dict(self.losses)
            culprits = [job_id for job_id in dead if job_id in last and lost_with[last[job_id]] == 1]
            suspects = {worker for job_id, worker in self.losses if job_id in culprits}
            for job_id, job in self.jobs.items():
                if job.status is QUEUED and job_id not in culprits:
                    job.attempt = max(0, job.attempt - sum(worker in suspects for worker in job.lost_with))

        @initialize(target=ids, attempts=st.lists(st.integers(1, 3), min_size=FEW, max_size=FEW), ttl=st.booleans())
        def submit(self, attempts: list[int], ttl: bool) -> Any:
            submitted = []
            for max_attempts in attempts:
                request = JobRequest(model="m", prompt="x", max_attempts=max_attempts, ttl_s=3600 if ttl else None)
                submitted.append(ledger.submit(request).job.id)
                self.jobs[submitted[-1]] = Modelled(max_attempts, has_ttl=ttl)
            return multiple(*submitted, RAW)

        @initialize(target=leases, owner=st.sampled_from(OWNERS))
        def raw_message(self, owner: str) -> Any:
            [result] = ledger.claim([Claim(RAW, JobRequest(model="m", prompt="x"))], owner, 3600)
            assert result.lease == Lease(RAW, owner, 1, 1)
            self.jobs[RAW] = Modelled(3, RUNNING, 1, result.lease, releasable=result.lease)
            return result.lease

        @rule(
            target=leases,
            job_ids=st.lists(ids, min_size=1, max_size=3, unique=True),
            owner=st.sampled_from(OWNERS),
            alone=st.booleans(),
        )
        def claim(self, job_ids: list[str], owner: str, alone: bool) -> Any:
            results = ledger.claim([Claim(job_id, alone=alone) for job_id in job_ids], owner, 3600)
            given, dead = [], []
            for job_id, result in zip(job_ids, results, strict=True):
                job = self.jobs[job_id]
                assert result.verdict is job.verdict(alone)
                if job.status is RUNNING and job.lapsed and result.verdict is not Verdict.ALONE:
                    self.lose(job_id)
                if result.verdict is Verdict.DEAD:
                    dead.append(job_id)
                if result.verdict is Verdict.RUN:
                    job.status, job.attempt, job.lapsed = RUNNING, job.attempt + 1, False
                    job.holder = job.releasable = result.lease
                    assert result.lease.attempt == job.attempt
                    given.append(result.lease)
                elif result.verdict in ENDED_BY:
                    job.end(ENDED_BY[result.verdict])
            self.clear_companions(dead)
            return multiple(*given)

        @rule(leases=st.lists(leases, max_size=3, unique_by=lambda lease: lease.job_id))
        def renew(self, leases: list[Lease]) -> None:
            renewal = ledger.renew(leases, 3600)
            held = {lease.job_id for lease in leases if self.jobs[lease.job_id].holder == lease}
            assert renewal.lost == {lease.job_id for lease in leases} - held
            assert renewal.cancelled == {job_id for job_id in held if self.jobs[job_id].cancel}
            for job_id in held:
                self.jobs[job_id].lapsed = False

        @rule(
            leases=st.lists(leases, min_size=1, max_size=3, unique_by=lambda lease: lease.job_id),
            status=st.sampled_from(END_STATES),
            partial=st.booleans(),
        )
        def commit(self, leases: list[Lease], status: JobStatus, partial: bool) -> None:
            outcomes = []
            for lease in leases:
                text = f"{lease.owner} {lease.fence}" if partial or status is JobStatus.SUCCEEDED else None
                result = JobResult(text=text) if text is not None else None
                reason = Reason.ENGINE_ERROR if status is JobStatus.FAILED else None
                outcomes.append(Outcome(lease, status, result, reason))
            written = ledger.commit(outcomes)
            for outcome, answer in zip(outcomes, written, strict=True):
                job = self.jobs[outcome.lease.job_id]
                if job.holder == outcome.lease:
                    assert answer
                    job.end(status)
                    job.text = outcome.result.text if outcome.result is not None else None
                    job.committed = (outcome.lease, status)
                else:
                    assert answer == (job.committed == (outcome.lease, status))

        @rule(lease=leases)
        def release(self, lease: Lease) -> None:
            job = self.jobs[lease.job_id]
            [answer] = ledger.release([lease])
            assert answer == (job.releasable == lease)
            if job.holder == lease:
                if job.cancel:
                    job.end(JobStatus.CANCELLED)
                else:
                    job.status, job.holder, job.attempt = QUEUED, None, job.attempt - 1

        @rule(job_ids=st.lists(ids, max_size=3))
        def cancel(self, job_ids: list[str]) -> None:
            jobs = ledger.request_cancel([*job_ids, "unknown"])
            assert set(jobs) == set(job_ids)
            for job_id in set(job_ids):
                job = self.jobs[job_id]
                if job.status is QUEUED:
                    job.end(JobStatus.CANCELLED)
                elif job.status is RUNNING:
                    job.cancel = True

        @rule(job_id=ids)
        def retry(self, job_id: str) -> None:
            job = self.jobs[job_id]
            allowed = job.status in (JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.EXPIRED)
            if not allowed:
                with pytest.raises(IllegalTransition):
                    ledger.retry(job_id)
                return
            ledger.retry(job_id)
            self.jobs[job_id] = Modelled(job.max_attempts, has_ttl=job.has_ttl)

        @rule(job_id=ids)
        def lease_lapses(self, job_id: str) -> None:
            if self.jobs[job_id].status is RUNNING:
                sql("UPDATE jobs SET lease_until = created_at WHERE id = :id", id=job_id)
                self.jobs[job_id].lapsed = True

        @rule(job_id=ids)
        def its_worker_dies(self, job_id: str) -> None:
            self.lease_lapses(job_id=job_id)
            self.reap()

        @rule(job_id=ids)
        def deadline_passes(self, job_id: str) -> None:
            if self.jobs[job_id].has_ttl:
                sql("UPDATE jobs SET deadline = created_at WHERE id = :id", id=job_id)
                self.jobs[job_id].overdue = True

        @rule()
        def reap(self) -> None:
            expected, dead = 0, []
            for job_id, job in self.jobs.items():
                if job.status is RUNNING and job.lapsed:
                    verdict = job.verdict()
                    self.lose(job_id)
                    if verdict is Verdict.DEAD:
                        dead.append(job_id)
                    if verdict is Verdict.RUN:
                        job.status, job.holder, job.releasable, job.lapsed = QUEUED, None, None, False
                    else:
                        job.end(ENDED_BY[verdict])
                elif job.status is QUEUED and job.overdue:
                    job.end(JobStatus.EXPIRED)
                else:
                    continue
                expected += 1
            self.clear_companions(dead)
            assert ledger.reap() == expected

        @rule(limit=st.integers(1, 5))
        def relay_sends(self, limit: int) -> None:
            rows = ledger.outbox(limit)
            for row in rows:
                assert row.topic is Topic.REVOKE or not self.jobs[row.job_id].status.terminal
            ledger.sent([row.id for row in rows])

        @rule()
        def broker_forgets(self) -> None:
            """Every queued job that has no row to send is found and given one."""
            lost = [row.job_id for row in ledger.queued("m", -1, 1000)]
            assert ledger.republish(lost) == len(lost)
            unsent = {row.job_id for row in sql("SELECT job_id FROM outbox WHERE sent_at IS NULL")}
            assert {job_id for job_id, job in self.jobs.items() if job.status is QUEUED} <= unsent

        @invariant()
        def the_ledger_is_whole_and_says_what_the_model_says(self) -> None:
            ledger.check()
            rows = {row.id: row for row in ledger.page(JobFilter(limit=100)).data}
            assert rows.keys() == self.jobs.keys()
            for job_id, job in self.jobs.items():
                row = rows[job_id]
                text = row.result.text if row.result is not None else None
                assert (row.status, row.attempt, row.cancel_requested, text) == (
                    job.status,
                    job.attempt,
                    job.cancel,
                    job.text,
                )
                assert job.holder is None or row.worker == job.holder.owner

    return LedgerMachine


@pytest.mark.slow
def test_the_ledger_behaves_like_its_model(
    ledger: Ledger, sql: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatches, "HOLD_S", 0.0)
    monkeypatch.setattr(dispatches, "backoff_s", lambda attempts: 0.0)
    examples = 100 if request.config.getoption("--database") == "sqlite" else 30
    run_state_machine_as_test(
        machine_over(ledger, sql),
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
