"""Everything that a job needs, as real processes that may be struck: two workers, an API, a broker, a database."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import redis
import sqlalchemy as sa
from headrace import Client
from headrace.contract import Job, JobStatus

from ledger.database import make_engine
from tests.conftest import ROOT, Broker, free_port
from tests.faults.points import VARIABLE, Points, Strike
from tests.faults.postgres import PostgresServer
from tests.faults.witness import Seen, Witness, contradictions
from tests.outage import outage
from tests.workers import MODEL, WorkerProcess, Workplace, eventually

LEASE_S = 2.0
"""Of the workers on the stage; the default is longer, and a cell waits for it."""
RECOVERY_S = LEASE_S + 2.0
"""After a worker's death its jobs run again within this."""
TOKENS = 24


class ApiProcess:
    """The HTTP door, with the points of a submission in it."""

    def __init__(self, env: dict[str, str], log: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.points"],
                cwd=ROOT, env={**os.environ, **env, "HEADRACE_API__PORT": str(port)},
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait_ready(self, within_s: float = 30.0) -> ApiProcess:
        def answers() -> bool:
            assert self.process.poll() is None, self.log_path.read_text()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/healthz", timeout=2).status_code == 200
            return False

        eventually(answers, within_s, "the API answers")
        return self

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


@dataclass
class Stage:
    """Open for many faults in turn: whoever was killed is replaced before the next one."""

    broker: Broker
    place: Workplace
    points: Points
    witness: Witness
    postgres: PostgresServer | None
    """The database's server, or None if that is a SQLite file."""
    api: ApiProcess
    client: Client
    worker_settings: dict[str, object] = field(default_factory=dict)
    accepted: list[str] = field(default_factory=list)
    """Every job that anybody was promised, since the beginning."""
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(1, 10_000)))

    @classmethod
    def open(
        cls,
        broker: Broker,
        database_url: str,
        home: Path,
        postgres: PostgresServer | None = None,
        workers: int = 2,
        **worker_settings: object,
    ) -> Stage:
        place = Workplace.open(broker.url, database_url, home)
        directory = home / "points"
        directory.mkdir()
        witness = Witness(database_url)
        api = ApiProcess(api_environment(place, directory), home / "api.log", free_port())
        client = Client(api.url, retries=20)
        settings = {"WORKER__LEASE_S": LEASE_S, "WORKER__DRAIN_S": 5, **worker_settings}
        stage = cls(broker, place, Points(directory), witness, postgres, api, client, settings)
        try:
            for _ in range(workers):
                stage.start_worker()
            stage.all_ready()
        except BaseException:
            stage.close()
            raise
        return stage

    def close(self) -> None:
        self.points.clear()
        self.client.close()
        self.api.kill()
        self.place.close()
        self.witness.close()

    # -- the troupe ----------------------------------------------------------------------------

    @property
    def workers(self) -> list[WorkerProcess]:
        """Those that live."""
        return [worker for worker in self.place.workers if worker.process.poll() is None]

    def start_worker(self, environ: Mapping[str, str] | None = None) -> WorkerProcess:
        """One more, which isn't waited for."""
        return self.place.start_worker(
            f"w{next(self._numbers)}",
            step_s=0.01,
            extra=("-I", "tests.faults.points"),
            ready=False,
            environ={VARIABLE: str(self.points.directory), **(environ or {})},
            **self.worker_settings,
        )

    def restart_api(self, environ: Mapping[str, str] | None = None) -> None:
        """On the same port, as a service manager does."""
        self.api.kill()
        env = api_environment(self.place, self.points.directory)
        self.api = ApiProcess({**env, **(environ or {})}, self.api.log_path, httpx.URL(self.api.url).port or 0)

    def replace_the_dead(self, count: int = 2) -> None:
        for _ in range(count - len(self.workers)):
            self.start_worker()
        if self.api.process.poll() is not None:
            self.restart_api()

    def wait_ended(self, pid: int, within_s: float) -> None:
        """Until all threads of one of the troupe have gone; its first may be a zombie before that."""
        troupe = (self.api.process, *(worker.process for worker in self.place.workers))
        next(process for process in troupe if process.pid == pid).wait(within_s)

    def all_ready(self) -> None:
        for worker in self.workers:
            worker.wait_ready()
        self.api.wait_ready()

    # -- the play ------------------------------------------------------------------------------

    def submit(self, count: int = 1, **fields: object) -> list[str]:
        """Jobs over HTTP. The client repeats what was not answered."""
        parameters = {"max_tokens": TOKENS, "temperature": 0.0, **fields}
        ids = [self.client.submit("hello", model=MODEL, **parameters).id for _ in range(count)]  # type: ignore[arg-type]
        self.accepted += ids
        return ids

    @contextlib.contextmanager
    def submitting(self, count: int = 1, **fields: object) -> Iterator[Future[list[str]]]:
        """The same, from a thread of its own."""
        with ThreadPoolExecutor(1) as pool:
            yield pool.submit(lambda: self.submit(count, **fields))

    def send(self, count: int = 1) -> list[str]:
        """Jobs of a raw Celery producer."""
        ids = [self.place.send(max_tokens=TOKENS).id for _ in range(count)]
        self.accepted += ids
        return ids

    def strike(self, point: str, strike: Strike, submit: Callable[[], Sequence[str]], within_s: float = 15.0) -> int:
        """Arm a point, submit, and return the process that was struck there."""
        self.points.arm(point, strike)
        submit()
        pid = eventually(lambda: self.points.struck(point), within_s, f"somebody comes by {point!r}")
        if strike is Strike.STOP:
            eventually(lambda: state_of(pid) == "T", 5, f"process {pid} stands still")
        return pid

    def strike_submission(self, point: str, fault: AbstractContextManager[None], away_s: float) -> None:
        """Two jobs are held at a point of their submission while the fault lasts, and are accepted after it."""
        self.points.arm(point, Strike.HOLD)
        with self.submitting(2) as submission:
            eventually(lambda: self.points.struck(point), 15, f"somebody comes by {point!r}")
            with fault:
                self.points.clear()
                time.sleep(away_s)
            submission.result(timeout=30)

    @contextlib.contextmanager
    def database_away(self) -> Iterator[None]:
        """Nobody can write for a while: a stopped server, or somebody who keeps SQLite's one lock."""
        if self.postgres is None:
            with outage(self.place.database_url):
                yield
            return
        self.postgres.stop()
        try:
            yield
        finally:
            self.postgres.start()

    # -- the end -------------------------------------------------------------------------------

    def ended(self, within_s: float = 30.0) -> list[Job]:
        """Every accepted job, once all have ended."""
        deadline_s = time.monotonic() + within_s
        return [self.place.ended(job_id, within_s=max(0.1, deadline_s - time.monotonic())) for job_id in self.accepted]

    def assert_clean(self, within_s: float = 30.0, status: JobStatus = JobStatus.SUCCEEDED) -> list[Job]:
        """Every accepted job has one end and one result, and nothing of it is left anywhere."""
        jobs = self.ended(within_s)
        wrong = {job.id: job.status for job in jobs if job.status is not status}
        assert not wrong, f"not {status}: {wrong}"
        if status is JobStatus.SUCCEEDED:
            texts = {job.result.text for job in jobs if job.result is not None}
            assert len(texts) == 1, texts
        assert contradictions(self.witness.stories(), self.accepted) == []
        self.place.ledger.check()
        self.assert_nothing_left(within_s)
        return jobs

    def assert_nothing_left(self, within_s: float = 30.0) -> None:
        """No message, row, lease, slot, page, spooled outcome or key that nothing will remove."""
        eventually(lambda: not self._left_rows(), within_s, "the outbox is empty and no lease is held")
        eventually(lambda: not self._left_messages(), within_s, "every message is acknowledged")
        eventually(lambda: all(map(self._is_idle, self.workers)), within_s, "every engine is empty")
        assert not list((self.place.home / "home" / "spool").glob("*")), "an outcome is left in the spool"
        assert self._lasting_keys() == []

    def _left_rows(self) -> dict[str, int]:
        asked = {
            "outbox": "SELECT COUNT(*) FROM outbox",
            "leases": "SELECT COUNT(*) FROM jobs WHERE lease_until IS NOT NULL",
        }
        engine = make_engine(self.place.database_url)
        with engine.connect() as connection:
            found = {name: int(connection.execute(sa.text(sql)).scalar_one()) for name, sql in asked.items()}
        engine.dispose()
        return {name: count for name, count in found.items() if count}

    def _left_messages(self) -> int:
        return self.place.unacked() + int(self.place.redis.zcard("unacked_index")) + self.place.queued_messages()

    def _is_idle(self, worker: WorkerProcess) -> bool:
        """Whether it holds nothing, or is gone."""
        if worker.process.poll() is not None:
            return True
        try:
            answer = self.place.app.control.inspect([worker.node], timeout=1.0).stats() or {}
        except redis.ConnectionError:  # a connection from before the broker's death
            return False
        if worker.node not in answer:
            return False
        pool = answer[worker.node]["pool"]
        engine = pool["engine"]
        return bool(
            pool["slots"] == 0
            and engine["running"] == engine["waiting"] == 0
            and engine["pages_free"] == engine["pages_total"]
        )

    def _lasting_keys(self) -> list[str]:
        """Keys that have no time to live. Kombu's bindings are few, and meant to stay; a worker that was slow to answer
        `inspect` told nobody."""
        broker = self.place.redis
        lasting = (key for key in broker.scan_iter("*") if broker.ttl(key) == -1)
        names = (key.decode() for key in lasting)
        return [name for name in names if not name.startswith("_kombu.") and not name.endswith(".reply.celery.pidbox")]

    def stories(self) -> dict[str, list[Seen]]:
        return dict(self.witness.stories())


def api_environment(place: Workplace, points: Path) -> dict[str, str]:
    return {
        VARIABLE: str(points),
        "HEADRACE_HOME": str(place.home / "home"),
        "HEADRACE_REDIS_URL": place.broker_url,
        "HEADRACE_DATABASE_URL": place.database_url,
    }


def state_of(pid: int) -> str:
    """The kernel's letter for a process: R, S, T (stopped), Z, or X if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def go_on(pid: int) -> None:
    """Let a stopped process run."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
