"""A worker whose model is divided among processes: jobs through the queue, whichever process dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headrace.contract import JobStatus

from tests.unit.engine.model.random_models import save_random_model
from tests.workers import WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow

PROMPT = "<5> <6> <7> <8>"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), "Llama")[1]


@pytest.fixture
def start(start_worker: Callable[..., WorkerProcess], path: Path, tmp_path: Path) -> Callable[..., WorkerProcess]:
    """A worker over so many ranks, and what it needs to be quick."""

    def start(name: str, ranks: int, **settings: Any) -> WorkerProcess:
        return start_worker(
            name,
            ready=False,
            CACHE=tmp_path,
            MODEL__MODEL_PATH=path,
            MODEL__TENSOR_PARALLEL_SIZE=ranks,
            MODEL__DEVICE="cpu",
            MODEL__DTYPE="float32",
            MODEL__MAX_SEQ_LEN=500,
            WORKER__LEASE_S=3,
            **settings,
        ).wait_ready(120)

    return start


def children(process_id: int) -> list[int]:
    """The ranks' processes of a worker."""
    found = Path(f"/proc/{process_id}/task").glob("*/children")
    ids = [int(child) for file in found for child in file.read_text().split()]
    return [child for child in ids if b"engine.parallel" in Path(f"/proc/{child}/cmdline").read_bytes()]


def gone(process_id: int) -> bool:
    return not Path(f"/proc/{process_id}/cmdline").exists() or not Path(f"/proc/{process_id}/cmdline").read_bytes()


def test_jobs_come_to_their_end_whichever_process_is_killed(
    workplace: Workplace, start: Callable[..., WorkerProcess]
) -> None:
    """First one of the ranks', which ends the worker; then a worker's own, which ends its ranks."""
    job = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "seed": 3, "temperature": 0.7}
    first = start("w1", 2)
    [rank] = children(first.process.pid)
    info = workplace.pool_info(first)
    assert info["device"] == "cpu x 2"
    ids = [workplace.send(**job).id for _ in range(4)]
    workplace.running(*ids)
    os.kill(rank, signal.SIGKILL)
    assert first.wait(20) != 0
    told = (f"rank 1 (process {rank}) ended by signal 9", "the model's ranks are of no use any more")
    assert any(words in first.log for words in told), "by whoever notices first: the watcher, or a step"

    second = start("w2", 2)
    [rank] = children(second.process.pid)
    eventually(lambda: workplace.job(ids[0]).attempt == 2, 20, "the second worker takes over")
    second.kill()
    eventually(lambda: gone(rank), 10, "a rank ends with its worker")

    start("w3", 1)
    jobs = [workplace.ended(job_id, 40) for job_id in ids]
    assert {job.status for job in jobs} == {JobStatus.SUCCEEDED}
    assert len({job.result.text for job in jobs if job.result}) == 1
    assert {job.result.usage.completion_tokens for job in jobs if job.result} == {400}
    workplace.ledger.check()


def test_a_worker_that_is_told_to_leave_takes_its_ranks_along(
    workplace: Workplace, start: Callable[..., WorkerProcess]
) -> None:
    """Service managers signal every process: the ranks finish what runs, too."""
    worker = start("w1", 2)
    [rank] = children(worker.process.pid)
    sent = workplace.send(prompt=PROMPT, max_tokens=200, ignore_eos=True)
    workplace.running(sent.id)
    for process in (rank, worker.process.pid):
        os.kill(process, signal.SIGTERM)
    assert worker.wait(30) == 0
    assert gone(rank)
    assert workplace.job(sent.id).status is JobStatus.SUCCEEDED


def test_a_size_that_doesn_t_divide_is_one_line(
    start_worker: Callable[..., WorkerProcess], path: Path, tmp_path: Path
) -> None:
    worker = start_worker(
        ready=False, CACHE=tmp_path, MODEL__MODEL_PATH=path, MODEL__TENSOR_PARALLEL_SIZE=4, MODEL__DEVICE="cpu"
    )
    assert worker.wait(60) != 0
    assert "tensor_parallel_size=4 doesn't divide this model" in worker.log
    assert "these sizes divide it: 2\n" in worker.log
    assert "Traceback" not in worker.log
