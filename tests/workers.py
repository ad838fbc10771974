"""What tests of the whole worker share: a workplace of real parts, and worker processes in it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import redis
from celery import Celery
from celery.states import EXCEPTION_STATES, READY_STATES
from headrace.contract import Job, JobRequest, new_job_id
from headrace.wire import TASK_GENERATE, celery_config, queue_name
from kombu import pools

from ledger import Ledger
from ledger.migrate import upgrade

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
MODEL = "fake"


def eventually(probe: Callable[[], T], within_s: float = 10.0, what: str = "") -> T:
    """Call `probe` until it gives something true, and return that."""
    deadline = time.monotonic() + within_s
    while True:
        found = probe()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what or probe}")
        time.sleep(0.02)


class Sent:
    """A task that was sent: `AsyncResult` without its subscriptions, which outlive a broker that a test kills."""

    def __init__(self, app: Celery, task_id: str) -> None:
        self._app = app
        self.id = task_id

    @property
    def state(self) -> str:
        return str(self._app.backend.get_task_meta(self.id, cache=False)["status"])

    def get(self, timeout: float) -> Any:
        eventually(lambda: self.state in READY_STATES, timeout, f"task {self.id} is ready")
        meta = self._app.backend.get_task_meta(self.id, cache=False)
        if meta["status"] in EXCEPTION_STATES:
            raise meta["result"]
        return meta["result"]


class WorkerProcess:
    """`celery -A worker.app worker` with a fake model."""

    def __init__(self, name: str, env: dict[str, str], log: Path, extra: Sequence[str]) -> None:
        self.name = name
        self.log_path = log
        self._log = open(log, "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "worker.app", "worker", "-l", "INFO",
             "--without-gossip", "--without-mingle", "-n", f"{name}@test", *extra],
            cwd=ROOT, env={**os.environ, **env}, stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    @property
    def node(self) -> str:
        return f"{self.name}@test"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, within_s: float = 60.0) -> WorkerProcess:
        """Return once the worker consumes. A busy machine is slow at its imports; one that ended is told at once."""
        deadline = time.monotonic() + within_s
        while f"{self.node} ready." not in self.log:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the worker did not start:\n{self.log}")
            time.sleep(0.02)
        return self

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, within_s: float = 20.0) -> int:
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker did not leave within {within_s} s:\n{self.log}") from None

    def stop(self, within_s: float = 20.0) -> int:
        """SIGTERM, and the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait(within_s)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._log.close()

    @property
    def metrics_url(self) -> str:
        found = re.search(r"metrics: port \d+ is taken .* moved to (\d+)", self.log) or re.search(
            r"metrics: port (\d+)", self.log
        )
        assert found is not None
        return f"http://127.0.0.1:{found[1]}/metrics"


@dataclass
class Workplace:
    """A broker and a ledger, as a producer and a database administrator see them."""

    broker_url: str
    database_url: str
    home: Path
    app: Celery
    ledger: Ledger
    redis: redis.Redis
    workers: list[WorkerProcess] = field(default_factory=list)

    @classmethod
    def open(cls, broker_url: str, database_url: str, home: Path) -> Workplace:
        upgrade(database_url)
        app = Celery("producer", set_as_current=False)
        app.conf.update(celery_config(broker_url))
        return cls(broker_url, database_url, home, app, Ledger(database_url), redis.Redis.from_url(broker_url))

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        pools.reset()
        self.app.close()
        self.ledger.close()
        self.redis.close()

    def start_worker(
        self,
        name: str = "w1",
        *,
        step_s: float = 0.005,
        extra: Sequence[str] = (),
        ready: bool = True,
        environ: Mapping[str, str] | None = None,
        **env: object,
    ) -> WorkerProcess:
        """A worker whose engine steps every `step_s`; `env` are settings without their prefix (`WORKER__LEASE_S`)."""
        settings = {
            "HOME": self.home / "home",
            "REDIS_URL": self.broker_url,
            "DATABASE_URL": self.database_url,
            "MODEL__MODEL_PATH": f"fake:step_s={step_s}",
            "MODEL__ALIAS": MODEL,
            "MODEL__KV_CACHE_BYTES": 64 * 2**20,
            "WORKER__METRICS_PORT": 0,
            **env,
        }
        log = self.home / f"{name}-{len(self.workers)}.log"
        set_ = {f"HEADRACE_{key}": str(value) for key, value in settings.items()}
        worker = WorkerProcess(name, set_ | dict(environ or {}), log, extra)
        self.workers.append(worker)
        return worker.wait_ready() if ready else worker

    # -- producing -----------------------------------------------------------------------------

    def send(self, task_id: str | None = None, **kwargs: Any) -> Sent:
        """A raw Celery producer's job: the whole request in the message."""
        options = {"queue": queue_name(MODEL), **kwargs.pop("options", {})}
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 32, "temperature": 0.0, **kwargs}
        return self.send_task(kwargs=body, task_id=task_id or new_job_id(), **options)

    def send_task(self, **options: Any) -> Sent:
        """Whatever Celery lets one send to our task."""
        return Sent(self.app, self.app.send_task(TASK_GENERATE, **options).id)

    def submit(self, **fields: Any) -> Job:
        """A job in the ledger, as the door writes it. A worker's relay sends its message."""
        request = JobRequest.model_validate(
            {"model": MODEL, "prompt": "hello", "max_tokens": 32, "temperature": 0.0, **fields}
        )
        return self.ledger.submit(request).job

    # -- looking -------------------------------------------------------------------------------

    def job(self, job_id: str) -> Job:
        found = self.ledger.get(job_id)
        assert found is not None, f"no job {job_id}"
        return found

    def ended(self, job_id: str, within_s: float = 15.0) -> Job:
        """The job, once it has ended."""

        def probe() -> Job | None:
            job = self.ledger.get(job_id)
            return job if job is not None and job.status.terminal else None

        return eventually(probe, within_s, f"job {job_id} ends")

    def answers(self) -> list[str]:
        """The texts of a few jobs, greedy and seeded ones, which are the same whatever computes them."""
        jobs = [
            self.submit(prompt=f"job {n}", max_tokens=60, temperature=0.4 * (n % 2), seed=n, ignore_eos=True)
            for n in range(4)
        ]
        ended = [self.ended(job.id, 40) for job in jobs]
        assert all(job.result for job in ended), [job.error for job in ended]
        return [job.result.text for job in ended if job.result]

    def running(self, *job_ids: str, within_s: float = 10.0) -> None:
        """Return once all these jobs have produced a token."""
        from headrace.wire import stream_key

        eventually(
            lambda: all(self.redis.xlen(stream_key(job_id)) > 1 for job_id in job_ids), within_s, f"{job_ids} run"
        )

    def pool_info(self, worker: WorkerProcess) -> dict[str, Any]:
        answer = self.app.control.inspect([worker.node], timeout=2.0).stats()
        assert answer is not None, f"{worker.node} doesn't answer:\n{worker.log}"
        info: dict[str, Any] = answer[worker.node]["pool"]
        return info

    def unacked(self) -> int:
        return int(self.redis.hlen("unacked"))

    def queued_messages(self) -> int:
        name = queue_name(MODEL)
        return sum(int(self.redis.llen(key)) for key in (name, *(f"{name}\x06\x16{n}" for n in (3, 6, 9))))
