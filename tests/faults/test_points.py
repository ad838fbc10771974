"""Each process of a job is struck at each point of the job's life: the job ends once, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from headrace.contract import JobStatus

from ledger.dispatches import HOLD_S
from settings import WorkerSettings
from tests.faults.points import SUBMISSION, WORK, Strike
from tests.faults.stage import LEASE_S, RECOVERY_S, Stage, go_on, state_of
from tests.workers import eventually

pytestmark = pytest.mark.slow

IN_WORKER = [point.name for point in WORK]
IN_DOOR = [point.name for point in SUBMISSION]
JOBS = 4
SLACK_S = 2.0
"""What a busy machine may take of its own."""


def at(points: Iterable[str], *usual: str) -> Any:
    """A test at each of the points, of which the suite runs the usual ones."""
    given = [pytest.param(point, marks=() if point in usual else (pytest.mark.faults,)) for point in points]
    return pytest.mark.parametrize("point", given)


def both_ways(stage: Stage) -> Callable[[], list[str]]:
    """Submit jobs, half of them over HTTP and half as a raw producer."""
    return lambda: stage.submit(JOBS // 2) + stage.send(JOBS // 2)


@at(IN_WORKER, "before claim", "after commit")
def test_a_worker_is_killed(stage: Stage, point: str) -> None:
    """llm-d-async 404: a killed worker loses the jobs it had taken.

    All come over HTTP: a raw message may be lost with the worker that is just reading it, see `docs/operations.md`.
    """
    pid = stage.strike(point, Strike.KILL, lambda: stage.submit(JOBS))
    stage.wait_ended(pid, 5)
    assert max(job.attempt for job in stage.assert_clean()) <= 2


@at(IN_WORKER, "first token")
def test_a_worker_sleeps_past_its_lease_and_wakes_up(stage: Stage, point: str) -> None:
    """celery 5935, kombu 337: a job is delivered again while it runs, and has two results."""
    pid = stage.strike(point, Strike.STOP, both_ways(stage))
    time.sleep(LEASE_S + 1)
    go_on(pid)
    stage.assert_clean()


@at(IN_WORKER, "after claim")
def test_a_worker_is_told_to_leave(stage: Stage, point: str) -> None:
    """celery 4354, celery 3802, kombu 1836: a warm shutdown loses jobs, or runs them again."""
    pid = stage.strike(point, Strike.TERM, both_ways(stage))
    assert {job.attempt for job in stage.assert_clean()} == {1}
    stage.wait_ended(pid, 20)


@at(IN_WORKER, "before admission")
def test_a_worker_is_told_to_leave_at_once(stage: Stage, point: str) -> None:
    """celery 4354: what runs is handed back and what has ended is acknowledged, wherever the hub was just then."""
    pid = stage.strike(point, Strike.QUIT, both_ways(stage))
    assert {job.attempt for job in stage.assert_clean()} == {1}
    stage.wait_ended(pid, 20)


@at(IN_DOOR, "after submit")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["KILL", "TERM"])
def test_the_api_is_struck(stage: Stage, point: str, number: signal.Signals) -> None:
    """Whoever submitted repeats what was not answered, and one job comes of it."""
    api = stage.api
    stage.points.arm(point, Strike.HOLD)
    with stage.submitting(JOBS, idempotency_key=f"{point} {number.name}") as submission:
        pid = eventually(lambda: stage.points.struck(point), 15, f"somebody comes by {point!r}")
        os.kill(api.process.pid, number)
        stage.points.clear()
        eventually(lambda: api.process.poll() is not None, 15, "the API has ended")
        stage.restart_api()
        stage.api.wait_ready()
    assert len(set(submission.result())) == 1
    assert pid in (api.process.pid, *(worker.process.pid for worker in stage.workers))
    assert {job.attempt for job in stage.assert_clean()} == {1}


@at(IN_DOOR, "after submit")
def test_an_api_or_a_relay_sleeps_and_wakes_up(stage: Stage, point: str) -> None:
    """Whoever submits waits; what the sleeper was about to send is sent by another relay meanwhile."""
    stage.points.arm(point, Strike.STOP)
    with stage.submitting(JOBS, idempotency_key=f"{point} STOP") as submission:
        pid = eventually(lambda: stage.points.struck(point), 15, f"somebody comes by {point!r}")
        eventually(lambda: state_of(pid) == "T", 5, f"process {pid} stands still")
        time.sleep(HOLD_S + 1)
        go_on(pid)
    assert len(set(submission.result())) == 1
    assert {job.attempt for job in stage.assert_clean()} == {1}


@at(IN_DOOR[2:], "after publish")
@pytest.mark.parametrize("strike", [Strike.KILL, Strike.TERM])
def test_a_relay_is_struck(stage: Stage, point: str, strike: Strike) -> None:
    """Whichever process carries the message to the broker, it dies or leaves as it does."""
    stage.points.arm(point, strike)
    with stage.submitting(JOBS) as submission:
        pid = eventually(lambda: stage.points.struck(point), 15, f"somebody comes by {point!r}")
        stage.wait_ended(pid, 20)
        stage.replace_the_dead()
    submission.result()
    stage.assert_clean()


def test_no_key_of_a_job_is_there_for_ever(stage: Stage) -> None:
    """celery 3813, BentoML 5189: the keys of results grow for ever."""
    ids = stage.submit(2) + stage.send(2)
    stage.assert_clean()
    keys = [key for key in stage.place.redis.scan_iter("*") if any(job_id.encode() in key for job_id in ids)]
    assert len(keys) >= len(ids)
    assert all(stage.place.redis.ttl(key) > 0 for key in keys)


def test_a_killed_workers_jobs_run_again_within_the_lease_and_two_seconds(stage: Stage) -> None:
    pid = stage.strike("first token", Strike.KILL, lambda: stage.submit(JOBS, max_tokens=200))
    stage.wait_ended(pid, 5)
    died_s = time.time()
    stage.assert_clean()
    starts = [
        [seen.at.timestamp() for seen in story if seen.status is JobStatus.RUNNING]
        for job_id, story in stage.stories().items()
        if job_id in stage.accepted
    ]
    waited_s = [again_s - died_s for _, *others in starts for again_s in others]
    assert waited_s, "the killed worker had jobs"
    assert max(waited_s) < RECOVERY_S + SLACK_S
    assert WorkerSettings().lease_s <= 15, "what it is by default"
