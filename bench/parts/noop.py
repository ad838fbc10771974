"""Jobs that do nothing, through the whole of Headrace and through plain Celery: what the queue itself costs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import redis
import sqlalchemy as sa
from headrace import JobRequest, JobStatus, Producer
from headrace.wire import WORKER_KEY_PREFIX, queue_keys

from bench.instance import instance, versions
from bench.peers.place import ROOT
from bench.results import Sample, SideResult
from bench.side import SideFailed
from cli.bringup import Stack
from cli.services import child_environment
from ledger import Ledger

SLOTS = 64
POLL_S = 0.02
TIMEOUT_S = 600.0
MODEL = "fake"


@dataclass(frozen=True, slots=True)
class Spent:
    """What a round took."""

    seconds: float
    submitted_s: float
    worker_cpu_s: float

    def sample(self, jobs: int) -> Sample:
        return {
            "jobs_per_s": jobs / self.seconds,
            "seconds": self.seconds,
            "submitted_s": self.submitted_s,
            "worker_cpu_us_per_job": 1e6 * self.worker_cpu_s / jobs,
        }


class HeadraceJobs:
    """A whole Headrace whose model is fake; a job asks it for no token."""

    def __init__(self, stack: Stack, more_workers: Sequence[int] = ()) -> None:
        self._stack = stack
        self._workers = [psutil.Process(pid) for pid in (stack.supervisor.pids()["worker"], *more_workers)]
        self._ledger = Ledger(stack.at.database_url)
        self._broker = redis.Redis.from_url(stack.at.broker_url)
        self._ended = 0

    @classmethod
    @contextmanager
    def running(cls, workers: int = 1) -> Iterator[HeadraceJobs]:
        with (
            instance(model_path=MODEL, max_num_seqs=SLOTS, kv_cache_bytes=64 * 2**20) as stack,
            ExitStack() as more,
        ):
            yield cls(stack, [more.enter_context(_another_worker(stack)) for _ in range(workers - 1)])

    @property
    def broker_url(self) -> str:
        return self._stack.at.broker_url

    def facts(self) -> SideResult:
        settings = {
            "model": MODEL,
            "max_num_seqs": SLOTS,
            "workers": len(self._workers),
            "ledger": "SQLite",
            "submitted": "headrace.Producer.submit_many",
        }
        title = "Headrace: claim, engine, commit, result, acknowledgement"
        if len(self._workers) > 1:
            title += f"; {len(self._workers)} workers"
        return SideResult(title, _facts(settings, versions()))

    def round(self, jobs: int) -> Spent:
        """Submit so many jobs, and wait until each is committed and acknowledged.

        To ask the broker time and again takes little from those who work; the ledger is asked at the end.
        """
        with Producer(self._stack.at.broker_url) as producer:
            began_s, cpu_s = time.perf_counter(), self._cpu_s()
            request = JobRequest(model=MODEL, prompt="x", max_tokens=0, stream=False, metadata={})
            producer.submit_many([request] * jobs)
            submitted_s = time.perf_counter() - began_s
            _await(lambda: not (self._broker.exists(*queue_keys(MODEL)) or self._broker.hlen("unacked")))
            _await(lambda: self._ledger.counts().get(MODEL, {}).get(JobStatus.SUCCEEDED, 0) >= self._ended + jobs)
        self._ended += jobs
        return Spent(time.perf_counter() - began_s, submitted_s, self._cpu_s() - cpu_s)

    def _cpu_s(self) -> float:
        return sum(cpu(worker) for worker in self._workers)


@contextmanager
def _another_worker(stack: Stack) -> Iterator[int]:
    """One more worker of the stack's model; gives its process id once it consumes."""
    with redis.Redis.from_url(stack.at.broker_url) as broker:
        ready = len(broker.keys(f"{WORKER_KEY_PREFIX}*")) + 1
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", "worker"],
            cwd=ROOT,
            env={**os.environ, **child_environment(stack.settings, stack.at)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        try:
            _await(lambda: len(broker.keys(f"{WORKER_KEY_PREFIX}*")) >= ready)
            yield process.pid
        finally:
            process.terminate()
            process.wait(60)


class CeleryJobs:
    """Celery's own thread pool and database result backend."""

    def __init__(self, app: Any, worker: psutil.Process, backend_url: str, broker_url: str) -> None:
        self._app = app
        self._worker = worker
        self._database = sa.create_engine(backend_url.removeprefix("db+"))
        self._broker = redis.Redis.from_url(broker_url)
        self._ended = 0

    @classmethod
    @contextmanager
    def running(cls, broker_url: str, directory: Path) -> Iterator[CeleryJobs]:
        os.environ |= {
            "NOOP_BROKER_URL": broker_url,
            "NOOP_BACKEND_URL": f"db+sqlite:///{directory / 'results.sqlite3'}",
        }
        from bench.noop_worker import app

        command = [sys.executable, "-m", "celery", "-A", "bench.noop_worker", "worker", "--pool", "threads"]
        command += ["--concurrency", str(SLOTS), "--without-gossip", "--without-mingle"]
        with (directory / "celery.log").open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            app.send_task("noop.run", args=("x", 0)).get(timeout=60)
            jobs = cls(app, psutil.Process(process.pid), os.environ["NOOP_BACKEND_URL"], broker_url)
            jobs._ended = jobs._count()
            yield jobs
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()

    def facts(self) -> SideResult:
        settings = {"pool": "threads", "concurrency": SLOTS, "result backend": "database (SQLite)"}
        found = {name: version(name) for name in ("celery", "kombu", "redis", "sqlalchemy")}
        return SideResult("Celery: its thread pool and its database result backend", _facts(settings, found))

    def round(self, jobs: int) -> Spent:
        """Submit so many tasks, and wait until each has its result stored and is acknowledged."""
        began_s, cpu_s = time.perf_counter(), cpu(self._worker)
        for _ in range(jobs):
            self._app.send_task("noop.run", kwargs={"prompt": "x", "max_tokens": 0})
        submitted_s = time.perf_counter() - began_s
        _await(lambda: not (self._broker.exists("celery") or self._broker.hlen("unacked")))
        _await(lambda: self._count() >= self._ended + jobs)
        self._ended += jobs
        return Spent(time.perf_counter() - began_s, submitted_s, cpu(self._worker) - cpu_s)

    def _count(self) -> int:
        with self._database.connect() as connection:
            return int(connection.execute(sa.text("SELECT count(*) FROM celery_taskmeta")).scalar_one())


def _facts(settings: dict[str, Any], found: dict[str, str]) -> dict[str, Any]:
    return {"settings": settings, "versions": found}


def cpu(process: psutil.Process) -> float:
    """Seconds of processor time that the process has taken."""
    used = process.cpu_times()
    return float(used.user + used.system)


def _await(probe: Any) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not probe():
        if time.monotonic() > until_s:
            raise SideFailed(f"not all jobs had ended after {TIMEOUT_S:g} s")
        time.sleep(POLL_S)
