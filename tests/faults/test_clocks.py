"""The hosts' clocks disagree by a minute: the ledger goes by its database's clock, and the messages by the broker's.

On PostgreSQL alone: a SQLite ledger and all who use it are on one machine, and have its clock.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from headrace.contract import JobStatus

from ledger.migrate import upgrade
from tests.conftest import Broker, new_postgres_database
from tests.faults.postgres import PostgresServer
from tests.faults.stage import LEASE_S, Stage
from tests.workers import eventually

pytestmark = pytest.mark.slow

MINUTE_S = 60
SOON_S = 25.0
"""Much less than what the clocks are apart, and much more than a busy machine takes."""
LONG = 400


class Clocks:
    """The wall clocks of processes that are yet to be started."""

    def __init__(self, directory: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("c++")
        if compiler is None:
            pytest.skip("shifting a process's clock takes a C compiler")
        self._library = directory / "clock.so"
        source = Path(__file__).with_name("clock.c")
        subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-O1", source, "-o", self._library], check=True)
        told = [sys.executable, "-c", "import time; print(time.time() - float(input()))"]
        shown = subprocess.run(
            told, env=self.ahead(MINUTE_S), input=str(time.time()), capture_output=True, text=True, check=True
        )
        assert float(shown.stdout) == pytest.approx(MINUTE_S, abs=5), "the clock is not shifted"

    def ahead(self, seconds: int) -> dict[str, str]:
        """The environment of a process whose clock is ahead, or behind."""
        return {"LD_PRELOAD": str(self._library), "CLOCK_AHEAD_S": str(seconds)}


@pytest.fixture
def stage(on_postgres: None, broker: Broker, postgres_server: PostgresServer, tmp_path: Path) -> Iterator[Stage]:
    """One worker a minute ahead, one a minute behind, and an API that is two behind."""
    clocks = Clocks(tmp_path)
    url = new_postgres_database(postgres_server.url())
    upgrade(url)
    stage = Stage.open(broker, url, tmp_path, postgres_server, workers=0)
    stage.restart_api(clocks.ahead(-2 * MINUTE_S))
    for ahead_s in (MINUTE_S, -MINUTE_S):
        stage.start_worker(clocks.ahead(ahead_s))
    stage.all_ready()
    yield stage
    stage.close()


def test_what_lives_is_left_alone_and_what_is_lost_or_late_is_found_in_time(stage: Stage) -> None:
    nothing_is_taken_for_lost_or_late(stage)
    stage.accepted.clear()
    a_dead_workers_jobs_are_taken_over(stage)
    stage.accepted.clear()
    a_jobs_time_is_over_when_it_is(stage)


def nothing_is_taken_for_lost_or_late(stage: Stage) -> None:
    """Leases, the stamps of messages and the lives of jobs outlast several rounds of all who look at them."""
    limits = {"max_tokens": LONG, "ttl_s": MINUTE_S // 2}
    sent = [stage.place.send(**limits).id for _ in range(8)]
    ids = stage.submit(8, **limits) + sent
    stage.accepted += sent
    stage.place.running(*ids, within_s=SOON_S)
    time.sleep(2 * LEASE_S)
    jobs = stage.assert_clean()
    assert {job.attempt for job in jobs} == {1}
    assert len({job.worker for job in jobs}) == 2, "both took part"
    for job in jobs:
        assert job.timings is not None
        assert 0 <= (job.timings.queue_time_ms or 0) < 1000 * SOON_S
        assert 0 < (job.timings.total_time_ms or 0) < 1000 * MINUTE_S


def a_dead_workers_jobs_are_taken_over(stage: Stage) -> None:
    """After a lease, and not after a minute."""
    ids = stage.submit(4, max_tokens=LONG)
    stage.place.running(*ids, within_s=SOON_S)
    holders = [str(stage.place.job(job_id).worker) for job_id in ids]
    dead = next(worker for worker in stage.workers if holders[0].startswith(f"{worker.node}/"))
    dead.process.kill()
    orphans = [job_id for job_id, holder in zip(ids, holders, strict=True) if holder == holders[0]]
    eventually(lambda: all(stage.place.job(job_id).attempt == 2 for job_id in orphans), SOON_S, "they are taken over")
    stage.assert_clean()


def a_jobs_time_is_over_when_it_is(stage: Stage) -> None:
    stage.submit(1, max_tokens=20 * LONG, ttl_s=3)
    [job] = stage.ended(within_s=SOON_S)
    assert (job.status, job.attempt) == (JobStatus.EXPIRED, 1), "it ran, and was stopped"
