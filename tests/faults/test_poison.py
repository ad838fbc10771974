"""A job that kills its worker is found, and takes no other job along."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from headrace.contract import JobStatus, Reason

from tests.workers import WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow

DEATHS = {"die": -signal.SIGKILL, "abort": -signal.SIGABRT}


class Supervisor:
    """Starts a worker whenever there is none, as an orchestrator does, and counts how they died."""

    def __init__(self, start: Callable[..., WorkerProcess]) -> None:
        self._start = start
        self._worker: WorkerProcess | None = None
        self.deaths: list[int] = []

    def look(self) -> None:
        status = None if self._worker is None else self._worker.process.poll()
        if status is not None:
            self.deaths.append(status)
        if self._worker is None or status is not None:
            self._worker = self._start(f"w{len(self.deaths)}", step_s=0.01, ready=False, WORKER__LEASE_S=1)

    @property
    def log(self) -> str:
        return "" if self._worker is None else self._worker.log


@pytest.mark.parametrize("how", DEATHS)
def test_a_poison_job_is_found_and_its_companions_finish(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess], how: str
) -> None:
    """celery 9082, worker-vllm 29: a job that kills its worker is redelivered for ever, and with it all others are."""
    companions = [workplace.submit(prompt=f"innocent {n}", max_tokens=150).id for n in range(6)]
    poison = workplace.submit(prompt=f"<<{how}:20>>", max_tokens=60).id
    supervisor = Supervisor(start_worker)

    def settled() -> bool:
        supervisor.look()
        return all(workplace.job(job).status.terminal for job in [*companions, poison])

    eventually(settled, 150, "every job ends")
    assert supervisor.deaths == [DEATHS[how]] * 3
    culprit = workplace.job(poison)
    assert culprit.error is not None
    assert (culprit.error.code, culprit.attempt) == (Reason.DEAD_LETTER, 3)
    jobs = [workplace.job(job) for job in companions]
    assert {job.status for job in jobs} == {JobStatus.SUCCEEDED}
    assert all(job.result is not None and len(job.result.token_ids) == 150 for job in jobs)
    losses = workplace.ledger.losses(poison)
    assert [loss.attempt for loss in losses] == [1, 2, 3]
    assert losses[-1].companions == 0, "its last attempt was alone"
    fresh = workplace.submit(max_tokens=5).id
    assert workplace.ended(fresh).status is JobStatus.SUCCEEDED
    workplace.ledger.check()


def test_a_job_that_has_to_be_alone_waits_for_the_others_and_they_for_it(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    """It is innocent: it ends. What comes meanwhile isn't claimed, so that it has nothing to lose."""
    first = start_worker("w1", step_s=0.02, WORKER__LEASE_S=1)
    suspect = workplace.submit(max_tokens=100, max_attempts=2).id
    workplace.running(suspect)
    first.kill()
    worker = start_worker("w2", step_s=0.02, WORKER__LEASE_S=1)
    running = workplace.submit(max_tokens=250).id
    eventually(lambda: "its last attempt runs alone" in worker.log, 15, "the suspect has come")
    late = workplace.submit(max_tokens=5).id
    for job in (suspect, running, late):
        assert workplace.ended(job, within_s=30).status is JobStatus.SUCCEEDED
    ends = [workplace.job(job).finished_at for job in (running, suspect, late)]
    begins = [workplace.job(job).started_at for job in (running, suspect, late)]
    assert begins[1] is not None
    assert ends[1] is not None
    assert begins[2] is not None
    assert ends[0] is None or ends[0] <= begins[1] or ends[1] <= (begins[0] or ends[1]), "never side by side"
    assert ends[1] <= begins[2], "the late one was not claimed while the suspect ran"
    assert workplace.job(suspect).attempt == 2


def test_a_job_that_waits_to_be_alone_can_be_stopped_and_handed_back(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    first = start_worker("w1", step_s=0.02, WORKER__LEASE_S=1, MODEL__MAX_NUM_SEQS=2)
    stopped, left = (workplace.submit(max_tokens=1000, max_attempts=2).id for _ in range(2))
    workplace.running(stopped, left)
    worker = start_worker("w2", step_s=0.02, WORKER__LEASE_S=1, WORKER__DRAIN_S=0)
    workplace.running(workplace.submit(max_tokens=3000).id)
    first.kill()
    eventually(lambda: worker.log.count("its last attempt runs alone") == 2, 40, "both suspects have come")
    workplace.ledger.request_cancel([stopped])
    assert workplace.ended(stopped).status is JobStatus.CANCELLED
    assert worker.stop() == 0
    assert (workplace.job(left).status, workplace.job(left).attempt) == (JobStatus.QUEUED, 1)
    assert workplace.queued_messages() >= 2, "its message is back, and that of the long one"
    assert workplace.unacked() <= 2, "those of the dead worker"
    workplace.ledger.check()
