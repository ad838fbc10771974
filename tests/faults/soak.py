"""`make soak`: every fault mixed under load, and a report of what became of the jobs.

    python -m tests.faults.soak --minutes 5 --seed 7
    python -m tests.faults.soak --jobs 1000 --faults kill --database postgres

The same seed injects the same faults in the same order. Exit code 0: every accepted job has one end and one result,
nothing is left of any, and whatever died was made up for in time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path

from headrace import HeadraceError
from headrace.contract import JobStatus

from ledger.contract import LedgerUnavailable
from ledger.migrate import upgrade
from settings import WorkerSettings
from tests.conftest import Broker, new_postgres_database
from tests.faults.attendance import Stay, attended_s, ready_s, stays
from tests.faults.postgres import PostgresServer
from tests.faults.stage import Stage, go_on
from tests.faults.test_broker_faults import crashed, cut_off, demoted, frozen, full, wiped
from tests.faults.witness import contradictions
from tests.workers import WorkerProcess

WORKERS = 2
BETWEEN_S = 1.0
AWAY_S = 1.5
LEASE_S = WorkerSettings().lease_s
KILL_RECOVERY_S = LEASE_S + 2.0
RETURN_RECOVERY_S = 5.0
BACKLOG = 64
"""Jobs that are under way at once."""
SLOTS = 32
"""Of them in one worker: half of them die with it at most."""
END_WITHIN_S = 120.0
MAX_ATTEMPTS = 100
"""Of the jobs, which are all innocent of the deaths that they see."""


@dataclass
class Report:
    """What happened."""

    seed: int
    broker: str
    database: str
    minutes: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    jobs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    slowest_takeover_s: float = 0.0
    """From the last sign of a killed worker to the next attempt of a job that it ran. While no worker is there, which
    on a busy machine takes a while to start, nothing counts as late."""
    slowest_disturbed_takeover_s: float = 0.0
    """Likewise, where broker or database were out meanwhile, for which time nothing counts either."""
    slowest_return_s: dict[str, float] = field(default_factory=dict)
    """From the return of a part to the next job's start, by what was done to it; counted in the same way."""
    wrong: list[str] = field(default_factory=list)

    def text(self) -> str:
        told = [one.name for one in fields(self) if one.name != "wrong"]
        lines = [f"{name.replace('_', ' ')}: {_plain(getattr(self, name))}" for name in told]
        return "\n".join([*lines, *(f"WRONG: {what}" for what in self.wrong)])


def _plain(value: object) -> str:
    """Counts as `name 3, other 2`."""
    return (
        ", ".join(f"{key} {number}" for key, number in sorted(value.items())) if isinstance(value, dict) else str(value)
    )


class Soak:
    """One run on one stage."""

    def __init__(self, stage: Stage, report: Report) -> None:
        self._stage = stage
        self._report = report
        self._random = random.Random(report.seed)
        self._stop = threading.Event()
        self._killed: list[tuple[str, float]] = []
        """Workers' nodes, and when they died (Unix time)."""
        self._returned: list[tuple[str, float]] = []
        self._away: dict[str, list[Stay]] = defaultdict(list)
        """When which node couldn't work."""
        self._outages: list[Stay] = []
        """When nobody could, because broker or database were out."""

    def run(self, jobs: int | None, until_s: float, faults: Sequence[str]) -> None:
        """Load until so many jobs are accepted, or until the time is over."""
        began_s = time.monotonic()
        load = threading.Thread(target=self._load, args=(jobs, until_s), name="load")
        load.start()
        while load.is_alive():
            load.join(BETWEEN_S)
            if load.is_alive():
                self._inject(self._random.choice(faults))
            self._stage.replace_the_dead(WORKERS)
        self._stage.replace_the_dead(WORKERS)
        self._report.minutes = round((time.monotonic() - began_s) / 60, 2)
        self._judge()

    def _load(self, jobs: int | None, until_s: float) -> None:
        while (jobs is None or len(self._stage.accepted) < jobs) and time.monotonic() < until_s:
            with contextlib.suppress(LedgerUnavailable, HeadraceError):  # not accepted: nobody was promised anything
                counts = self._stage.place.ledger.counts().get("fake", {})
                if sum(count for status, count in counts.items() if not status.terminal) >= BACKLOG:
                    time.sleep(0.05)
                    continue
                self._stage.submit(1, max_tokens=self._random.choice((4, 24, 60)), max_attempts=MAX_ATTEMPTS)

    # -- faults --------------------------------------------------------------------------------

    def _inject(self, fault: str) -> None:
        """Do that to somebody; a worker that isn't ready yet is let be."""
        if fault in WORKERS_FAULTS:
            ready = [worker for worker in self._stage.workers if "ready." in worker.log]
            if not ready:
                return
            act: Callable[[WorkerProcess], None] = getattr(self, f"_{fault}")
            act(self._random.choice(ready))
        else:
            getattr(self, f"_{fault}")()
        self._report.faults[fault] += 1

    def _kill(self, worker: WorkerProcess) -> None:
        worker.process.kill()
        worker.process.wait(10)
        died_s = time.time()
        self._killed.append((worker.node, died_s))
        self._away[worker.node].append((died_s, math.inf))

    def _leave(self, worker: WorkerProcess) -> None:
        self._away[worker.node].append((time.time(), math.inf))
        worker.signal(self._random.choice((signal.SIGTERM, signal.SIGQUIT)))

    def _sleep(self, worker: WorkerProcess) -> None:
        slept_s = time.time()
        os.kill(worker.process.pid, signal.SIGSTOP)
        time.sleep(LEASE_S + 1)
        go_on(worker.process.pid)
        self._away[worker.node].append((slept_s, time.time()))

    def _api(self) -> None:
        process = self._stage.api.process
        if self._random.random() < 0.5:
            process.send_signal(signal.SIGSTOP)
            time.sleep(AWAY_S)
            process.send_signal(signal.SIGCONT)
        else:
            process.kill()
            process.wait(10)

    def _broker(self) -> None:
        fault = self._random.choice((crashed, wiped, frozen, cut_off, full, demoted))
        self._take_out(f"broker {fault.__name__}", fault(self._stage))

    def _database(self) -> None:
        self._take_out("database away", self._stage.database_away())

    def _take_out(self, what: str, outage: AbstractContextManager[None]) -> None:
        out_s = time.time()
        with outage:
            time.sleep(AWAY_S)
        self._outages.append((out_s, time.time()))
        self._returned.append((what, time.time()))

    # -- the verdict ---------------------------------------------------------------------------

    def _judge(self) -> None:
        stage, report = self._stage, self._report
        report.jobs = len(stage.accepted)
        with self._noting():
            stage.ended(END_WITHIN_S)
        for job_id in stage.accepted:
            job = stage.place.job(job_id)
            report.outcomes[job.status] += 1
            report.attempts[job.attempt] += 1
            if job.status is JobStatus.SUCCEEDED and job.result is None:
                report.wrong.append(f"{job_id} succeeded without a result")
        stories = stage.stories()
        report.wrong += contradictions(stories, stage.accepted)
        if set(report.outcomes) - {JobStatus.SUCCEEDED}:
            report.wrong.append(f"not all succeeded: {dict(report.outcomes)}")
        with self._noting():
            stage.all_ready()
            stage.place.ledger.check()
            stage.assert_nothing_left(END_WITHIN_S)
        starts = sorted(
            seen.at.timestamp() for story in stories.values() for seen in story if seen.status is JobStatus.RUNNING
        )
        there = self._attendance()
        for what, at_s in self._returned:
            next_s = next((start_s for start_s in starts if start_s > at_s), at_s)
            took_s = attended_s(there, at_s, next_s)
            report.slowest_return_s[what] = round(max(took_s, report.slowest_return_s.get(what, 0.0)), 2)
        late = {what: took_s for what, took_s in report.slowest_return_s.items() if took_s > RETURN_RECOVERY_S}
        if late:
            report.wrong.append(f"work went on later than {RETURN_RECOVERY_S} s after a return: {late}")
        self._judge_takeovers(
            {job_id: [(s.status, s.at.timestamp()) for s in story] for job_id, story in stories.items()}, there
        )

    def _attendance(self) -> list[Stay]:
        """When there were workers."""
        now_s = time.time()
        ready = {worker.node: ready_s(worker.log) for worker in self._stage.place.workers}
        return [
            stay
            for node, from_s in ready.items()
            if from_s is not None
            for stay in stays(from_s, now_s, [*self._away[node], *self._outages])
        ]

    def _judge_takeovers(self, stories: dict[str, list[tuple[JobStatus, float]]], there: Sequence[Stay]) -> None:
        """A job that ran when a worker died is queued again, or taken over, once its lease has run out.

        If broker or database were out at that time, it may wait for their recovery as well.
        """
        report = self._report
        for _, died_s in self._killed:
            for story in stories.values():
                before = [status for status, at_s in story if at_s <= died_s]
                after = [(status, at_s) for status, at_s in story if at_s > died_s]
                if not before or before[-1] is not JobStatus.RUNNING or not after or after[0][0].terminal:
                    continue
                next_s = after[0][1]
                took_s = round(attended_s(there, died_s, next_s), 2)
                if any(out_s < next_s and back_s > died_s for out_s, back_s in self._outages):
                    report.slowest_disturbed_takeover_s = max(report.slowest_disturbed_takeover_s, took_s)
                else:
                    report.slowest_takeover_s = max(report.slowest_takeover_s, took_s)
        if report.slowest_takeover_s > KILL_RECOVERY_S:
            report.wrong.append(f"a takeover took longer than lease + 2 s = {KILL_RECOVERY_S} s")
        if report.slowest_disturbed_takeover_s > KILL_RECOVERY_S + RETURN_RECOVERY_S:
            report.wrong.append(f"a takeover beside an outage took {RETURN_RECOVERY_S} s longer than that")

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self._report.wrong.append(str(error)[:500])


WORKERS_FAULTS = ("kill", "leave", "sleep")
MIXED = ("kill", "kill", "leave", "sleep", "api", "broker", "database")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--jobs", type=int, help="stop once so many are accepted")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", choices=["mixed", "kill"], default="mixed")
    parser.add_argument("--broker", choices=["valkey", "redis"], default="valkey")
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--report", type=Path, help="where the report is written, as JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-soak-", ignore_cleanup_errors=True) as directory:
        report = soak(asked, Path(directory))
    print(report.text())
    if asked.report is not None:
        asked.report.write_text(json.dumps(vars(report), indent=2, default=str))
    return 1 if report.wrong else 0


def soak(asked: argparse.Namespace, home: Path) -> Report:
    report = Report(asked.seed, asked.broker, asked.database)
    (home / "broker").mkdir()
    home.chmod(0o755)  # PostgreSQL doesn't run as root, and has to reach its data
    (home / "run").mkdir(mode=0o700)
    os.environ.setdefault("XDG_RUNTIME_DIR", str(home / "run"))
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    broker = Broker(asked.broker, home / "broker")
    broker.start()
    server, url = None, f"sqlite:///{home / 'ledger.sqlite3'}"
    if asked.database == "postgres":
        server = PostgresServer(home / "pg")
        server.start()
        url = new_postgres_database(server.url())
    upgrade(url)
    settings = {"WORKER__LEASE_S": LEASE_S, "MODEL__MAX_NUM_SEQS": SLOTS}
    stage = Stage.open(broker, url, home, server, workers=WORKERS, **settings)
    try:
        faults = ("kill",) if asked.faults == "kill" else MIXED
        Soak(stage, report).run(asked.jobs, time.monotonic() + 60 * asked.minutes, faults)
    finally:
        stage.close()
        broker.kill()
        if server is not None:
            server.kill()
    return report


if __name__ == "__main__":
    sys.exit(main())
