"""The API as a process of its own, and what one request may cost the others."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ledger import Ledger
from ledger.migrate import upgrade
from settings import Settings
from tests.conftest import free_port
from tests.integration.api.conftest import ApiServer, HandWorker, api_settings

PROGRAM = "from api.main import run_api; from settings import Settings; run_api(Settings())"


@pytest.fixture
def process(
    settings: Settings, worker: HandWorker, python: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    monkeypatch.setenv("HEADRACE_DATABASE_URL", settings.ledger_url)
    monkeypatch.setenv("HEADRACE_REDIS_URL", settings.broker_url)
    monkeypatch.setenv("HEADRACE_API__PORT", str(port))
    started = subprocess.Popen([python, "-c", PROGRAM])
    url = f"http://127.0.0.1:{port}"
    until_s = time.monotonic() + 30
    while True:
        try:
            httpx.get(f"{url}/healthz")
            break
        except httpx.TransportError:
            assert started.poll() is None
            assert time.monotonic() < until_s
            time.sleep(0.05)
    yield started, url
    started.kill()
    started.wait(10)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_though_clients_wait(
    process: tuple[subprocess.Popen[bytes], str], sent: signal.Signals
) -> None:
    started, url = process
    job = httpx.post(f"{url}/v1/jobs", json={"model": "bytes", "prompt": "x"}).json()

    def follow() -> bytes:
        with httpx.stream("GET", f"{url}{job['urls']['events']}", timeout=30) as response:
            return response.read()

    with ThreadPoolExecutor() as pool:
        poll = pool.submit(httpx.get, f"{url}{job['urls']['self']}?wait=60", timeout=30)
        stream = pool.submit(follow)
        time.sleep(0.5)
        began_s = time.monotonic()
        started.send_signal(sent)
        started.wait(10)
        assert time.monotonic() - began_s < 4
        assert poll.result().json()["status"] == "queued"
        assert b'"queued"' in stream.result()
    assert started.returncode == 0


def test_a_submitted_job_is_relayed_to_its_queue(
    process: tuple[subprocess.Popen[bytes], str], worker: HandWorker
) -> None:
    _, url = process
    httpx.post(f"{url}/v1/jobs", json={"model": "bytes", "prompt": "secret", "priority": "high"})
    until_s = time.monotonic() + 5
    while not worker.broker.llen("headrace.bytes"):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert "secret" not in worker.broker.lrange("headrace.bytes", 0, -1)[0]


def test_counting_huge_prompts_does_not_hold_up_others(database_url: str, broker_url: str, tmp_path: Path) -> None:
    upgrade(database_url)
    hand = HandWorker(Ledger(database_url), broker_url)
    hand.register()
    with ApiServer(api_settings(database_url, broker_url, tmp_path)).running() as server:
        huge = {"model": "bytes", "prompt": "word " * 300_000}
        with ThreadPoolExecutor() as pool:
            posts = [pool.submit(httpx.post, f"{server.url}/v1/jobs", json=huge, timeout=60) for _ in range(3)]
            slowest_s = 0.0
            while not all(post.done() for post in posts):
                began_s = time.monotonic()
                httpx.get(f"{server.url}/healthz")
                slowest_s = max(slowest_s, time.monotonic() - began_s)
                time.sleep(0.01)
            answers = [post.result() for post in posts]
    hand.close()
    assert {answer.json()["error"]["code"] for answer in answers} == {"context_length_exceeded"}
    assert "1500000" in answers[0].json()["error"]["message"]
    assert slowest_s < 1.0
