"""A real server on real parts, and a stand-in for the worker that uses the ledger and the stream as a worker does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import tokenizers
from headrace.contract import Job, JobResult, JobStatus, ModelCard, Reason, Timings, Usage
from headrace.events import StateEvent, TokenEvent
from headrace.wire import DONE_CHANNEL, STREAM_TTL_S, WORKER_KEY_TTL_S, stream_key, worker_key

from api.app import create_app
from api.main import Server
from ledger import Ledger
from ledger.contract import Claim, Lease, Outcome, Verdict
from ledger.migrate import upgrade
from settings import Settings
from tests.conftest import new_postgres_database
from text.bundle import TextBundle

MAX_SEQ_LEN = 64


def byte_bundle() -> TextBundle:
    """A tokenizer of one token for each byte, with a template that frames each message."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {**{piece: i for i, piece in enumerate(alphabet)}, "<end>": len(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return TextBundle(
        tokenizer_json=tokenizer.to_str(),
        chat_template="{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
        "{% endif %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}",
        bos_token=None,
        eos_token="<end>",
        eos_token_ids=(len(alphabet),),
        add_bos=False,
        vocab_size=len(vocab),
    )


class HandWorker:
    """Does by hand what a worker does for a job."""

    def __init__(self, ledger: Ledger, broker_url: str) -> None:
        self.ledger = ledger
        self.broker = redis.Redis.from_url(broker_url, decode_responses=True)
        self.leases: dict[str, Lease] = {}

    def register(self, model: str = "bytes", *, chat: bool = True, revision: str = "r1") -> None:
        bundle = byte_bundle()
        card = ModelCard(id=model, revision=revision, max_seq_len=MAX_SEQ_LEN, vocab_size=bundle.vocab_size, chat=chat)
        self.ledger.register_model(card, bundle.to_bytes())

    def announce(self, name: str = "w1", model: str = "bytes") -> None:
        self.broker.set(worker_key(name), f'{{"model": "{model}"}}', ex=WORKER_KEY_TTL_S)

    def emit(self, job_id: str, event: StateEvent | TokenEvent) -> str:
        key = stream_key(job_id)
        entry: str = self.broker.xadd(key, {"event": event.model_dump_json(exclude_none=True)})
        self.broker.expire(key, STREAM_TTL_S)
        return entry

    def start(self, job_id: str, lease_s: float = 30.0) -> Lease:
        (claimed,) = self.ledger.claim([Claim(job_id)], "w1", lease_s)
        assert claimed.verdict is Verdict.RUN
        assert claimed.lease is not None
        self.leases[job_id] = claimed.lease
        self.emit(job_id, StateEvent(status=JobStatus.RUNNING, attempt=claimed.lease.attempt))
        return claimed.lease

    def write(self, job_id: str, offset: int, text: str) -> str:
        attempt = self.leases[job_id].attempt
        return self.emit(job_id, TokenEvent(attempt=attempt, offset=offset, text=text))

    def commit(self, job_id: str, text: str, status: JobStatus = JobStatus.SUCCEEDED) -> None:
        good = status is JobStatus.SUCCEEDED
        reason = {JobStatus.FAILED: Reason.ENGINE_ERROR, JobStatus.CANCELLED: Reason.CANCELLED}.get(status)
        outcome = Outcome(
            lease=self.leases[job_id],
            status=status,
            result=JobResult(text=text, finish_reason="stop" if good else "abort", usage=Usage(completion_tokens=1)),
            reason=reason,
            message=None if good else "it broke",
            timings=Timings(total_time_ms=1.0),
        )
        assert self.ledger.commit([outcome]) == [True]

    def finish(self, job_id: str, text: str, status: JobStatus = JobStatus.SUCCEEDED) -> None:
        self.commit(job_id, text, status)
        self.emit(job_id, StateEvent(status=status, attempt=self.leases[job_id].attempt))
        self.broker.publish(DONE_CHANNEL, job_id)

    def run(self, job_id: str, *pieces: str, status: JobStatus = JobStatus.SUCCEEDED) -> None:
        self.start(job_id)
        offset = 0
        for piece in pieces:
            self.write(job_id, offset, piece)
            offset += len(piece)
        self.finish(job_id, "".join(pieces), status)

    def wait_for_submitted(self, count: int = 1) -> list[str]:
        """Ids of queued jobs, oldest first, once there are that many."""
        from ledger.contract import JobFilter

        until_s = time.monotonic() + 10
        while True:
            jobs = self.ledger.page(JobFilter(status=JobStatus.QUEUED, limit=100)).data
            if len(jobs) >= count:
                return [job.id for job in reversed(jobs)]
            assert time.monotonic() < until_s, f"{len(jobs)} of {count} jobs were submitted"
            time.sleep(0.01)

    def close(self) -> None:
        self.broker.close()
        self.ledger.close()


class ApiServer:
    """The API in a thread of this process, on a port that it keeps when it is started again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self.port = settings.api.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        api = self._settings.api.model_copy(update={"port": self.port})
        settings = self._settings.model_copy(update={"api": api})
        self._server = Server(create_app(settings), settings)
        self._thread = threading.Thread(target=self._server.run, name="api")
        self._thread.start()
        until_s = time.monotonic() + 10
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            assert time.monotonic() < until_s
            time.sleep(0.01)
        self.port = self._server.port

    def stop(self) -> float:
        """Stop, and say how many seconds that took."""
        if self._server is None or self._thread is None:
            return 0.0
        began_s = time.monotonic()
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not stop"
        self._server = self._thread = None
        return time.monotonic() - began_s

    @contextlib.contextmanager
    def running(self) -> Iterator[ApiServer]:
        self.start()
        try:
            yield self
        finally:
            self.stop()


def api_settings(database_url: str, broker_url: str, home: Path, **api: Any) -> Settings:
    return Settings(home=home, redis_url=broker_url, database_url=database_url, api={"port": 0, **api})


@pytest.fixture
def settings(database_url: str, broker_url: str, tmp_path: Path) -> Settings:
    upgrade(database_url)
    return api_settings(database_url, broker_url, tmp_path, max_body_bytes=100_000)


@pytest.fixture(scope="module")
def module_settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A database that the tests of one module share, and the session's broker."""
    home = tmp_path_factory.mktemp("shared")
    if request.config.getoption("--database") == "sqlite":
        url = f"sqlite:///{home / 'ledger.sqlite3'}"
    else:
        url = new_postgres_database(request.getfixturevalue("postgres_url"))
    upgrade(url)
    return api_settings(url, request.getfixturevalue("_session_broker").url, home, max_body_bytes=100_000)


@pytest.fixture
def worker(settings: Settings) -> Iterator[HandWorker]:
    hand = HandWorker(Ledger(settings.ledger_url), settings.broker_url)
    hand.register()
    yield hand
    hand.close()


@pytest.fixture
def server(settings: Settings, worker: HandWorker) -> Iterator[ApiServer]:
    with ApiServer(settings).running() as running:
        yield running


@pytest.fixture
def http(server: ApiServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture
def submitted(http: httpx.Client) -> Job:
    """A queued job."""
    response = http.post("/v1/jobs", json={"model": "bytes", "prompt": "hi"})
    assert response.status_code == 202, response.text
    return Job.model_validate_json(response.content)
