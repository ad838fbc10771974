"""Secrets are planted in every setting that takes one, and looked for in everything that Headrace says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import redis
from headrace import Client, Producer
from pydantic import ValidationError

from ledger import Ledger
from ledger.credentials import NewKey
from ledger.transport import CeleryTransport
from settings import Settings
from tests.conftest import Broker, free_port
from tests.workers import MODEL, Workplace, eventually

pytestmark = pytest.mark.slow

REDIS, DATABASE, SIGNING, PREVIOUS = (
    "planted-r3dis-pw",
    "planted-d4tabase-pw",
    "planted-sign1ng-key",
    "planted-0lder-key",
)
PLANTED = (REDIS, DATABASE, SIGNING, PREVIOUS)


def tell(text: str, where: str) -> None:
    for secret in PLANTED:
        assert secret not in text, f"{where} tells {secret}: {text[:2000]}"


@pytest.fixture
def guarded(broker: Broker, migrated_url: str, tmp_path: Path) -> Iterator[Workplace]:
    """A broker that asks for a password."""
    with redis.Redis(port=broker.port) as client:
        client.config_set("requirepass", REDIS)
    workplace = Workplace.open(f"redis://:{REDIS}@127.0.0.1:{broker.port}/0", migrated_url, tmp_path)
    yield workplace
    workplace.close()


def test_a_worker_and_an_api_tell_no_secret(guarded: Workplace, migrated_url: str, tmp_path: Path) -> None:
    """In their logs, metrics, answers, Celery's remote control, and their lists of arguments."""
    worker = guarded.start_worker(SIGNING_KEY=SIGNING, SIGNING_KEY_PREVIOUS=PREVIOUS)
    token = guarded.ledger.keys.create(NewKey("shop")).token
    port, log = free_port(), tmp_path / "api.log"
    env = {
        "HEADRACE_REDIS_URL": guarded.broker_url,
        "HEADRACE_DATABASE_URL": migrated_url,
        "HEADRACE_SIGNING_KEY": SIGNING,
        "HEADRACE_SIGNING_KEY_PREVIOUS": PREVIOUS,
        "HEADRACE_API__AUTH": "keys",
    }
    with log.open("wb") as out:
        api = subprocess.Popen(
            [sys.executable, "-m", "cli", "api", "--port", str(port)],
            env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: b"running on" in log.read_bytes(), 30, "the API runs")
        with Client(url, api_key=token) as client:
            job = client.run("hello", model=MODEL, max_tokens=3, timeout=30)
            tell(repr(client) + job.model_dump_json(), "the client")
            assert token not in repr(client._http.headers)
        bad = httpx.get(f"{url}/v1/jobs", headers={"Authorization": f"Bearer {token[:-1]}!"})
        for answer in (bad, httpx.get(f"{url}/readyz"), httpx.get(f"{url}/openapi.json")):
            tell(answer.text, str(answer.url))
            assert token[:-1] not in answer.text
        guarded.send(max_tokens=3)  # unsigned: refused, with a line in the log
        inspect = guarded.app.control.inspect([worker.node], timeout=3.0)
        for command in ("conf", "stats", "report", "registered", "active"):
            tell(json.dumps(getattr(inspect, command)() or {}, default=repr), f"inspect {command}")
        tell(httpx.get(worker.metrics_url).text, "the worker's metrics")
        for process in (api.pid, worker.process.pid):
            tell(" ".join(psutil.Process(process).cmdline()), "the process's arguments")
    finally:
        api.terminate()
        api.wait(20)
    assert worker.stop() == 0
    tell(worker.log, "the worker's log")
    tell(log.read_text(), "the API's log")
    assert token not in log.read_text()


@pytest.mark.parametrize("arguments", [["config"], ["config", "--json"], ["doctor"], ["doctor", "--json"]])
def test_the_command_line_tells_no_secret(arguments: list[str], tmp_path: Path) -> None:
    """Neither of a broker and a database that can't be reached."""
    env = {
        "HEADRACE_REDIS_URL": f"redis://user:{REDIS}@127.0.0.1:1/0",
        "HEADRACE_DATABASE_URL": f"postgresql://user:{DATABASE}@127.0.0.1:1/x?sslpassword={DATABASE}",
        "HEADRACE_SIGNING_KEY": SIGNING,
        "HEADRACE_SIGNING_KEY_PREVIOUS": PREVIOUS,
    }
    done = subprocess.run(
        [sys.executable, "-m", "cli", *arguments], env={**os.environ, **env},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "127.0.0.1:1" in done.stdout
    tell(done.stdout + done.stderr, " ".join(arguments))


def test_no_repr_and_no_error_tells_a_secret(migrated_url: str) -> None:
    settings = Settings(
        redis_url=f"redis://:{REDIS}@127.0.0.1:1/0",
        database_url=f"postgresql://u:{DATABASE}@127.0.0.1:1/x",
        signing_key=SIGNING,
        signing_key_previous=PREVIOUS,
    )
    tell(f"{settings} {settings!r} {settings.model_dump(mode='json')} {settings.model_dump_json()}", "the settings")
    transport = CeleryTransport(settings.broker_url, SIGNING)
    tell(repr(transport), "the transport")
    with Producer(settings.broker_url, signing_key=SIGNING) as producer:
        tell(repr(producer), "the producer")
    ledger = Ledger(settings.ledger_url)
    with pytest.raises(Exception, match=r".") as caught:
        ledger.now()
    tell(f"{ledger!r} {caught.value} {caught.value.__cause__!r}", "the ledger")
    ledger.close()


def test_a_setting_that_is_refused_is_not_repeated() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(signing_key="plant3d-short")
    assert "plant3d-short" not in str(caught.value)
