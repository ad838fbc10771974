"""A worker that lives and does not work: it says so where an orchestrator looks, and says when it works again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from headrace.contract import JobStatus
from headrace.wire import queue_name

from tests.faults.points import VARIABLE, Points, Strike
from tests.workers import MODEL, WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow

SOON_S = 15.0


@pytest.fixture
def points(tmp_path: Path) -> Points:
    directory = tmp_path / "points"
    directory.mkdir()
    return Points(directory)


@pytest.fixture
def worker(start_worker: Callable[..., WorkerProcess], points: Points) -> WorkerProcess:
    """One that can be held at the points of a job's life, and notices it soon."""
    modules = "tests.faults.points,tests.faults.impatient"
    return start_worker("w1", extra=("-I", modules), environ={VARIABLE: str(points.directory)})


def problem(worker: WorkerProcess) -> str:
    """What `/livez` complains of; nothing, if it answers with 200."""
    answer = httpx.get(worker.metrics_url.replace("/metrics", "/livez"), timeout=5)
    assert answer.status_code == (200 if answer.json()["status"] == "ok" else 503)
    return answer.json()["problem"] or ""


@pytest.mark.parametrize(
    ("point", "complaint"),
    [("before acknowledgement", "the hub has not turned for"), ("first token", "the engine has made no step for")],
)
def test_a_part_that_stands_is_told(
    workplace: Workplace, worker: WorkerProcess, points: Points, point: str, complaint: str
) -> None:
    """celery 10302: a worker that lives, and takes no job any more."""
    assert not problem(worker)
    points.arm(point, Strike.HOLD)
    job = workplace.send()
    eventually(lambda: complaint in problem(worker), SOON_S, complaint)
    points.clear()
    assert workplace.ended(job.id).status is JobStatus.SUCCEEDED
    eventually(lambda: not problem(worker), SOON_S, "it works again")


def test_a_worker_that_takes_nothing_though_messages_wait_is_told(workplace: Workplace, worker: WorkerProcess) -> None:
    """celery 10302: connected, idle, and deaf to its queue."""
    told = {"destination": [worker.node], "reply": True, "timeout": 5}
    assert workplace.app.control.cancel_consumer(queue_name(MODEL), **told)
    job = workplace.send()
    eventually(lambda: "messages wait and none has been taken" in problem(worker), SOON_S, "it says that it starves")
    assert workplace.ledger.get(job.id) is None, "nobody has taken it"
    assert workplace.app.control.add_consumer(queue_name(MODEL), **told)
    assert workplace.ended(job.id).status is JobStatus.SUCCEEDED
    eventually(lambda: not problem(worker), SOON_S, "it works again")
