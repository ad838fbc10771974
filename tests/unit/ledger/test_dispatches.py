"""The outbox, the reaper's work, and elections."""

from __future__ import annotations

from typing import Any

import pytest
from headrace.contract import JobStatus, Reason

from ledger import Ledger, dispatches
from ledger.contract import Dispatch, Outcome, Topic


@pytest.fixture
def no_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were taken are due again at once."""
    monkeypatch.setattr(dispatches, "HOLD_S", 0.0)


def send_all(ledger: Ledger) -> None:
    while rows := ledger.outbox(100):
        ledger.sent([row.id for row in rows])


def test_the_outbox_gives_revocations_and_then_the_oldest_jobs_with_what_routing_needs(
    ledger: Ledger, desk: Any
) -> None:
    first = desk.queued(model="a", priority="high")
    second = desk.queued(model="a", priority="high")
    lease = desk.running(model="b")
    ledger.request_cancel([lease.job_id])
    rows = ledger.outbox(10)
    assert [(r.topic, r.job_id, r.model, r.priority) for r in rows] == [
        (Topic.REVOKE, lease.job_id, "b", "normal"),
        (Topic.PUBLISH, first, "a", "high"),
        (Topic.PUBLISH, second, "a", "high"),
    ]


def test_what_is_to_be_stopped_is_taken_by_nobody(ledger: Ledger, desk: Any) -> None:
    desk.queued()
    lease = desk.running(model="b")
    ledger.request_cancel([lease.job_id])
    [told], again = ledger.revocations(10), ledger.revocations(10)
    assert (told.topic, told.job_id, told.fence) == (Topic.REVOKE, lease.job_id, lease.fence)
    assert again == [told]
    ledger.sent([told.id])
    assert ledger.revocations(10) == []
    assert [row.topic for row in ledger.outbox(10)] == [Topic.PUBLISH]


def test_rows_that_one_relay_took_are_not_anothers(ledger: Ledger, desk: Any) -> None:
    ids = [desk.queued() for _ in range(5)]
    taken, rest = ledger.outbox(3), ledger.outbox(10)
    assert [row.job_id for row in taken + rest] == ids
    assert ledger.outbox(10) == []


@pytest.mark.usefixtures("no_hold")
def test_rows_that_were_not_reported_sent_come_again(ledger: Ledger, desk: Any) -> None:
    desk.queued(), desk.queued()
    taken = ledger.outbox(10)
    assert [row.id for row in ledger.outbox(10)] == [row.id for row in taken]
    ledger.sent([taken[0].id])
    assert [row.id for row in ledger.outbox(10)] == [taken[1].id]
    ledger.sent([])


def test_the_id_of_a_row_is_never_used_again(ledger: Ledger, desk: Any) -> None:
    """A relay that reports an old row sent must not delete a new one that has its id."""
    first = desk.queued()
    [old] = ledger.outbox(10)
    ledger.request_cancel([first])
    second = desk.queued()
    ledger.sent([old.id])
    assert desk.topics(second) == ["publish"]


def test_the_reaper_requeues_a_dead_workers_job_and_raises_its_fence(ledger: Ledger, desk: Any, succeed: Any) -> None:
    """llm-d-async 404: what a killed worker had taken comes back."""
    dead, alive = desk.running("w1"), desk.running("w2")
    send_all(ledger)
    desk.lapse(dead.job_id)
    assert ledger.reap() == 1
    job = ledger.get(dead.job_id)
    assert (job.status, job.attempt, job.worker) == (JobStatus.QUEUED, 1, None)
    assert [row.job_id for row in ledger.outbox(10)] == [dead.job_id]
    assert ledger.release([dead]) == [False]
    assert ledger.commit([succeed(dead)]) == [False]
    assert ledger.commit([succeed(alive)]) == [True]
    assert desk.claimed(dead.job_id).attempt == 2
    assert ledger.reap() == 0


def test_the_reaper_ends_what_must_not_run_again(ledger: Ledger, desk: Any, succeed: Any) -> None:
    spent, unwanted, late, waiting = (
        desk.running(max_attempts=1),
        desk.running(),
        desk.running(ttl_s=100),
        desk.queued(ttl_s=100),
    )
    ledger.request_cancel([unwanted.job_id])
    desk.overdue(late.job_id), desk.overdue(waiting)
    desk.lapse(spent.job_id, unwanted.job_id, late.job_id)
    assert ledger.reap() == 4
    ends = {i: (ledger.get(i).status, ledger.get(i).error.code) for i in (spent.job_id, unwanted.job_id, late.job_id)}
    assert ends == {
        spent.job_id: (JobStatus.FAILED, Reason.DEAD_LETTER),
        unwanted.job_id: (JobStatus.CANCELLED, Reason.CANCELLED),
        late.job_id: (JobStatus.EXPIRED, Reason.DEADLINE_EXCEEDED),
    }
    assert desk.status(waiting) is JobStatus.EXPIRED
    assert desk.topics(waiting) == []
    assert ledger.commit([succeed(spent), succeed(late), Outcome(unwanted, JobStatus.CANCELLED)]) == [False] * 3


def test_the_reaper_leaves_a_job_whose_deadline_passes_to_its_live_worker(ledger: Ledger, desk: Any) -> None:
    lease = desk.running(ttl_s=100)
    desk.overdue(lease.job_id)
    assert ledger.reap() == 0
    assert desk.status(lease.job_id) is JobStatus.RUNNING


def test_the_reaper_works_in_bounded_batches(ledger: Ledger, desk: Any) -> None:
    leases = [desk.running() for _ in range(5)]
    desk.lapse(*(lease.job_id for lease in leases))
    assert [ledger.reap(2), ledger.reap(2), ledger.reap(2), ledger.reap(2)] == [2, 2, 1, 0]


def test_a_job_that_loses_worker_after_worker_is_published_later_each_time(ledger: Ledger, desk: Any, sql: Any) -> None:
    """llm-d-async 391: retries are spaced, and go behind fresh traffic."""
    job_id = desk.queued(max_attempts=9)
    send_all(ledger)
    for attempt in range(1, 4):
        assert desk.claimed(job_id).attempt == attempt
        desk.lapse(job_id)
        ledger.reap()
        assert bool(ledger.outbox(10)) == (attempt == 1)
    assert dispatches.backoff_s(1) == 0
    assert 1.5 <= dispatches.backoff_s(2) <= 2.5
    assert dispatches.backoff_s(99) <= 75


def test_queued_jobs_that_were_sent_are_found(ledger: Ledger, desk: Any) -> None:
    sent, other = desk.queued(priority="low"), desk.queued(model="other")
    send_all(ledger)
    desk.queued()
    desk.running()
    assert ledger.queued("m", -1, 10) == [Dispatch(0, Topic.PUBLISH, sent, "m", "low")]
    assert [row.job_id for row in ledger.queued("other", -1, 10)] == [other]
    assert ledger.queued("m", 60, 10) == []


def test_queued_jobs_come_longest_waiting_first_and_bounded(ledger: Ledger, desk: Any, sql: Any) -> None:
    ids = [desk.queued() for _ in range(4)]
    send_all(ledger)
    sql("UPDATE outbox SET sent_at = '2026-01-01 00:00:00.000000'")
    assert [row.job_id for row in ledger.queued("m", -1, 3)] == ids[:3]


def test_republishing_gives_queued_jobs_one_row(ledger: Ledger, desk: Any, succeed: Any) -> None:
    lost, unsent, running, done = desk.queued(), desk.queued(), desk.running().job_id, desk.succeeded()
    send_all(ledger)
    ledger.republish([unsent])
    assert ledger.republish([lost, unsent, running, done, "none"]) == 1
    assert [desk.topics(i) for i in (lost, unsent, running, done)] == [["publish"], ["publish"], [], []]
    assert ledger.republish([]) == 0


def test_sent_counts_leave_out_what_is_still_to_be_sent(ledger: Ledger, desk: Any) -> None:
    assert ledger.sent_counts() == {}
    desk.queued(), desk.running(), desk.succeeded()
    send_all(ledger)
    desk.queued(model="n")
    desk.queued()
    assert ledger.sent_counts() == {"m": {JobStatus.QUEUED: 1, JobStatus.RUNNING: 1}}


def test_one_process_has_a_role(ledger: Ledger) -> None:
    assert ledger.elect("reaper", "a", 30)
    assert not ledger.elect("reaper", "b", 30)
    assert ledger.elect("reaper", "a", 30)
    assert ledger.elect("other", "b", 30)


def test_a_role_passes_on_when_its_term_ends_or_it_is_laid_down(ledger: Ledger) -> None:
    assert ledger.elect("reaper", "a", -1)
    assert ledger.elect("reaper", "b", 30)
    assert not ledger.elect("reaper", "a", 30)
    assert ledger.elect("reaper", "b", 0)
    assert ledger.elect("reaper", "a", 30)
