"""The database or Redis is away for a while: what runs goes on, nothing is acknowledged too early, nothing is lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from headrace.contract import JobStatus

from tests.outage import outage
from tests.workers import WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow


def spooled_lines(home: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in (home / "home" / "spool").glob("*.jsonl"))


def test_outcomes_are_spooled_while_the_database_is_away(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(step_s=0.02, WORKER__LEASE_S=60)
    running = [workplace.send(max_tokens=50) for _ in range(4)]
    workplace.running(*(s.id for s in running))
    with outage(workplace.database_url):
        eventually(lambda: spooled_lines(workplace.home) == 4, 15, "four outcomes are spooled")
        waiting = workplace.send(max_tokens=3)
        eventually(lambda: workplace.pool_info(worker)["ledger"] == "unavailable", 5, "the worker says so")
        assert workplace.unacked() == 5
        assert running[0].state == waiting.state == "PENDING"
        assert workplace.pool_info(worker)["engine"]["running"] == 0
    for sent in [*running, waiting]:
        assert sent.get(timeout=15)["status"] == "succeeded"
        job = workplace.job(sent.id)
        assert job.status is JobStatus.SUCCEEDED
        assert job.attempt == 1
    eventually(lambda: workplace.unacked() == 0 and spooled_lines(workplace.home) == 0, 5, "all is settled")
    assert "the ledger is back" in worker.log
    workplace.ledger.check()


def test_an_outage_longer_than_the_leases_costs_no_outcome(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker(step_s=0.02, WORKER__LEASE_S=2)
    start_worker("w2", step_s=0.02, WORKER__LEASE_S=2)
    jobs = [workplace.submit(max_tokens=50, max_attempts=1) for _ in range(8)]
    workplace.running(*(job.id for job in jobs))
    with outage(workplace.database_url):
        eventually(lambda: spooled_lines(workplace.home) == 8, 15, "eight outcomes are spooled")
        began = time.monotonic()
        eventually(lambda: time.monotonic() - began > 4, 6, "the leases have run out")
    for job in jobs:
        ended = workplace.ended(job.id, within_s=15)
        assert ended.status is JobStatus.SUCCEEDED, ended.error
        assert ended.attempt == 1
    workplace.ledger.check()


def test_a_spool_that_a_dead_worker_left_is_replayed(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(step_s=0.02, WORKER__LEASE_S=60)
    sent = workplace.send(max_tokens=50)
    workplace.running(sent.id)
    with outage(workplace.database_url):
        eventually(lambda: spooled_lines(workplace.home) == 1, 15, "the outcome is spooled")
        worker.kill()
    second = start_worker("w2", WORKER__LEASE_S=60)
    job = workplace.ended(sent.id, within_s=10)
    assert job.status is JobStatus.SUCCEEDED
    assert job.attempt == 1
    eventually(lambda: "replayed 1 spooled outcomes, 1 were still wanted" in second.log, 5, "the replay is logged")
    assert spooled_lines(workplace.home) == 0
    workplace.ledger.check()


def test_a_worker_leaves_while_the_database_is_away(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(step_s=0.02, WORKER__LEASE_S=2, WORKER__DRAIN_S=1)
    sent = workplace.send(max_tokens=50)
    workplace.running(sent.id)
    with outage(workplace.database_url):
        eventually(lambda: spooled_lines(workplace.home) == 1, 15, "the outcome is spooled")
        worker.signal(signal.SIGTERM)
        worker.wait(40)
        assert workplace.unacked() == 0
        assert workplace.queued_messages() == 1
    start_worker("w2", WORKER__LEASE_S=2)
    assert workplace.ended(sent.id, within_s=15).status is JobStatus.SUCCEEDED
    workplace.ledger.check()
