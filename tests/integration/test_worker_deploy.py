"""Workers are replaced under load: nothing is lost, nothing is begun anew, and no job waits for a timeout."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable

import pytest
from headrace.contract import JobStatus

from cli.checks.broker import check_broker
from cli.checks.finding import Level
from settings import Settings
from tests.workers import WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow

LEASE_S = 60
"""Longer than the whole test: a job that waited for its lease to run out would not end in it."""


def test_a_rolling_restart_of_three_workers_loses_nothing(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    """celery 4354, 3802: a warm shutdown loses or reruns jobs."""
    options = {"step_s": 0.02, "WORKER__LEASE_S": LEASE_S, "WORKER__DRAIN_S": 0.5, "MODEL__MAX_NUM_SEQS": 4}
    workers = [start_worker(f"old{n}", **options) for n in range(3)]
    jobs = [workplace.submit(prompt=f"job {n}", max_tokens=400).id for n in range(18)]
    for n, worker in enumerate(workers):
        jobs += [workplace.submit(prompt=f"late {n}.{m}", max_tokens=20).id for m in range(4)]
        start_worker(f"new{n}", **options)
        assert worker.stop() == 0
    for job_id in jobs:
        job = workplace.ended(job_id, within_s=60)
        assert (job.status, job.attempt) == (JobStatus.SUCCEEDED, 1)
    assert sum("goes on after" in worker.log for worker in workplace.workers), "what was handed back went on"
    assert all(loss == [] for loss in map(workplace.ledger.losses, jobs))
    eventually(lambda: workplace.unacked() + workplace.queued_messages() == 0, 15, "no message is left")
    workplace.ledger.check()


def test_a_worker_answers_whether_it_works(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    worker = start_worker("w1")
    workplace.ended(workplace.submit(max_tokens=5).id)
    with urllib.request.urlopen(worker.metrics_url.replace("/metrics", "/livez"), timeout=5) as answer:
        assert json.load(answer) == {"status": "ok", "problem": None}


def test_the_doctor_finds_two_workers_of_one_name(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    for name in ("twin", "twin", "other"):
        start_worker(name)
    found = [
        finding for finding in check_broker(Settings(redis_url=workplace.broker_url)) if "called" in finding.message
    ]
    assert [(finding.level, finding.message.partition("@")[0]) for finding in found] == [
        (Level.FAIL, "2 workers are called twin")
    ]
