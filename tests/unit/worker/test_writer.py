"""The writer thread against a real ledger."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from headrace.contract import JobRequest, JobResult, JobStatus, ModelCard, Reason, new_job_id

from ledger import Ledger
from ledger.contract import Claim, ClaimResult, Lease, Outcome, Verdict
from ledger.migrate import upgrade
from tests.outage import outage
from tests.workers import eventually
from worker.draft import ClaimedJob, Draft, Identity, refused
from worker.orders import Rejection
from worker.spool import Spool, leftovers
from worker.writer import Writer

WHO = Identity("w", "fake", "float32", "r1")


class Desk:
    """A writer, its ledger, and what it reported."""

    def __init__(self, url: str, home: Path, lease_s: float) -> None:
        self.url = url
        self.ledger = Ledger(url)
        self.lost: queue.SimpleQueue[Lease] = queue.SimpleQueue()
        self.cancelled: queue.SimpleQueue[Lease] = queue.SimpleQueue()
        self.writer = Writer(self.ledger, f"w/{new_job_id()}", lease_s, home, self.lost.put, self.cancelled.put)
        self.writer.start()

    def ask(self, order: Callable[[Any, Callable[[Any], None]], None], what: Any) -> Any:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        order(what, answers.put)
        return answers.get(timeout=20)

    def claim(self, job_id: str, request: JobRequest | None = None) -> ClaimResult:
        answer: ClaimResult = self.ask(self.writer.claim, Claim(job_id, request))
        return answer

    def run(self) -> ClaimedJob:
        result = self.claim(new_job_id(), JobRequest(model="fake", prompt="hi"))
        assert result.verdict is Verdict.RUN
        return ClaimedJob.from_claim(result)

    def status(self, job_id: str) -> JobStatus:
        job = self.ledger.get(job_id)
        assert job is not None
        return job.status

    def close(self) -> None:
        self.writer.stop(2)
        self.ledger.close()


@pytest.fixture
def open_desk(database_url: str, tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    upgrade(database_url)
    desks: list[Desk] = []

    def make(lease_s: float = 30.0) -> Desk:
        desks.append(Desk(database_url, tmp_path / "spool", lease_s))
        return desks[-1]

    yield make
    for desk in desks:
        desk.close()


def failed(job: ClaimedJob) -> Draft:
    return refused(job, WHO, Reason.ENGINE_ERROR, "broken")


def test_a_claim_and_its_commit(open_desk: Callable[..., Desk]) -> None:
    desk = open_desk()
    job = desk.run()
    recorded = desk.ask(desk.writer.commit, failed(job))
    outcome = recorded.outcome
    assert outcome.status is recorded.job.status is JobStatus.FAILED
    assert outcome.timings.total_time_ms >= outcome.timings.commit_time_ms >= 0
    assert desk.status(job.lease.job_id) is JobStatus.FAILED
    assert desk.claim(job.lease.job_id).verdict is Verdict.TERMINAL
    assert desk.ask(desk.writer.look, job.lease.job_id).id == job.lease.job_id


def test_leases_are_renewed_for_as_long_as_they_are_held(open_desk: Callable[..., Desk]) -> None:
    desk = open_desk(lease_s=0.6)
    job = desk.run()
    other = open_desk()
    until = desk.ledger.now()
    eventually(lambda: (desk.ledger.now() - until).total_seconds() > 1.5, 5)
    assert other.claim(job.lease.job_id).verdict is Verdict.DUPLICATE
    desk.writer.forget(job.lease.job_id)
    result = eventually(
        lambda: r if (r := other.claim(job.lease.job_id)).verdict is Verdict.RUN else None, 5, "the lease runs out"
    )
    assert result.lease is not None
    assert result.lease.attempt == 2
    assert desk.ask(desk.writer.commit, failed(job)) is None


def test_lost_leases_and_cancellations_are_reported(open_desk: Callable[..., Desk]) -> None:
    desk = open_desk(lease_s=0.6)
    wanted, lost = desk.run(), desk.run()
    desk.ledger.request_cancel([wanted.lease.job_id])
    desk.ledger.release([lost.lease])
    assert desk.cancelled.get(timeout=5) == wanted.lease
    assert desk.lost.get(timeout=5) == lost.lease


def test_a_row_that_the_ledger_refuses_harms_no_other(open_desk: Callable[..., Desk]) -> None:
    """BentoML 5694: a job whose handler raised stays IN_PROGRESS for ever."""
    desk = open_desk(lease_s=0.6)
    jobs = [desk.run() for _ in range(3)]
    drafts = [failed(job) for job in jobs]
    drafts[1] = Draft(jobs[1], JobStatus.RUNNING, drafts[1].timings, drafts[1].last_s)
    answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    for n, draft in enumerate(drafts):
        desk.writer.commit(draft, lambda answer, n=n: answers.put((n, answer)))  # type: ignore[misc]
    told = dict(answers.get(timeout=5) for _ in drafts)
    assert isinstance(told[1], ValueError)
    assert told[0].outcome.status is told[2].outcome.status is JobStatus.FAILED
    assert desk.status(jobs[1].lease.job_id) is JobStatus.RUNNING
    eventually(lambda: desk.ledger.reap() == 1, 5, "its lease runs out, as nothing else ends it")


def test_a_revoke_is_made_durable_once(open_desk: Callable[..., Desk]) -> None:
    desk = open_desk()
    queued = desk.ledger.submit(JobRequest(model="fake", prompt="hi")).job.id
    running = open_desk().run().lease.job_id
    desk.writer.cancel([queued, running, new_job_id()], running=False)
    eventually(lambda: desk.status(queued) is JobStatus.CANCELLED, 5)
    job = desk.ledger.get(running)
    assert job is not None
    assert not job.cancel_requested
    for _ in range(3):
        desk.writer.cancel([running], running=True)
    desk.run()
    job = desk.ledger.get(running)
    assert job is not None
    assert job.cancel_requested
    assert [row.topic.value for row in desk.ledger.outbox(10) if row.job_id == running] == ["revoke"]


def test_releases_rejections_and_models_are_written(open_desk: Callable[..., Desk]) -> None:
    desk = open_desk()
    job = desk.run()
    assert desk.ask(desk.writer.release, job.lease) is True
    assert desk.status(job.lease.job_id) is JobStatus.QUEUED
    bad = new_job_id()
    desk.ask(desk.writer.reject, Rejection(bad, "fake", Reason.INVALID_REQUEST, "no", "{}"))
    assert desk.status(bad) is JobStatus.FAILED
    card = ModelCard(id="fake", revision="r1", max_seq_len=10, vocab_size=5, chat=False)
    desk.writer.register(card, b"bundle")
    eventually(lambda: desk.ledger.models() == {"fake": card}, 5)


@pytest.mark.slow
def test_what_waits_when_the_thread_ends_is_in_the_spool(open_desk: Callable[..., Desk], tmp_path: Path) -> None:
    desk = open_desk()
    job = desk.run()
    success = Draft(job, JobStatus.SUCCEEDED, failed(job).timings, job.accepted_s, JobResult(text="x"))
    with outage(desk.url):
        desk.writer.commit(success, lambda _: None)
        eventually(lambda: not desk.writer.available(), 20, "the outage is noticed")
        desk.writer.stop(0.5)
    assert desk.status(job.lease.job_id) is JobStatus.RUNNING
    open_desk()
    eventually(lambda: desk.status(job.lease.job_id) is JobStatus.SUCCEEDED, 10)
    eventually(lambda: not leftovers(tmp_path / "spool"), 5)


def test_what_is_no_outcome_in_a_spool_keeps_nothing_from_its_end(
    open_desk: Callable[..., Desk], tmp_path: Path
) -> None:
    desk = open_desk()
    good, bad = desk.run(), desk.run()
    desk.writer.stop(5)
    spool = Spool(tmp_path / "spool")
    spool.append(
        [
            Outcome(bad.lease, JobStatus.RUNNING),
            Outcome(good.lease, JobStatus.SUCCEEDED, JobResult(text="x", finish_reason="stop")),
        ]
    )
    spool.close()
    (tmp_path / "spool" / "folder.jsonl").mkdir()
    again = open_desk()
    eventually(lambda: desk.status(good.lease.job_id) is JobStatus.SUCCEEDED, 10)
    eventually(lambda: not leftovers(tmp_path / "spool"), 5)
    assert again.run().lease.attempt == 1


def test_leaving_with_outcomes_that_nobody_takes_is_no_hot_loop(
    open_desk: Callable[..., Desk], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the database nor the disk: the time to leave passes asleep, and says once what is wrong."""
    (tmp_path / "spool").write_text("a file in the place of the directory")
    desk = open_desk()
    jobs = [desk.run() for _ in range(3)]
    with outage(desk.url):
        for job in jobs:
            desk.writer.commit(failed(job), lambda _: None)
        eventually(lambda: not desk.writer.available(), 20, "the writer knows")
        busy_s = time.process_time()
        desk.writer.stop(2)
        assert time.process_time() - busy_s < 1
    assert caplog.text.count("can't be spooled") == 1
