"""Long-polls: they wake at once, cost little, and end when anyone has had enough."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from headrace.contract import Job, JobStatus

from ledger import Ledger
from ledger.migrate import upgrade
from tests.conftest import Broker
from tests.integration.api.conftest import ApiServer, HandWorker, api_settings


def poll(server: ApiServer, job_id: str, wait_s: float = 20) -> tuple[float, dict[str, object]]:
    """Monotonic moment of the answer, and the job."""
    response = httpx.get(f"{server.url}/v1/jobs/{job_id}", params={"wait": wait_s}, timeout=wait_s + 10)
    assert response.status_code == 200, response.text
    return time.monotonic(), response.json()


def waiters(server: ApiServer) -> int:
    text = httpx.get(f"{server.url}/metrics").text
    return int(float(next(line.split()[1] for line in text.splitlines() if line.startswith("headrace_api_waiters"))))


def until_waiting(server: ApiServer, count: int) -> None:
    until_s = time.monotonic() + 20
    while waiters(server) != count:
        assert time.monotonic() < until_s, f"{waiters(server)} waiters, not {count}"
        time.sleep(0.02)


def test_a_waiter_wakes_within_100_ms_of_the_commit(server: ApiServer, worker: HandWorker, submitted: Job) -> None:
    worker.start(submitted.id)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(poll, server, submitted.id)
        until_waiting(server, 1)
        worker.commit(submitted.id, "x")
        worker.broker.publish("headrace:done", submitted.id)
        committed_s = time.monotonic()
        answered_s, job = answer.result()
    assert job["status"] == "succeeded"
    assert answered_s - committed_s < 0.1


def test_an_end_that_nobody_publishes_is_seen_within_seconds(
    server: ApiServer, worker: HandWorker, submitted: Job
) -> None:
    worker.start(submitted.id)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(poll, server, submitted.id)
        until_waiting(server, 1)
        worker.commit(submitted.id, "x")
        committed_s = time.monotonic()
        answered_s, job = answer.result()
    assert job["status"] == "succeeded"
    assert answered_s - committed_s < 2.5


def test_a_cancelled_job_wakes_its_waiter(server: ApiServer, submitted: Job) -> None:
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(poll, server, submitted.id)
        until_waiting(server, 1)
        httpx.post(f"{server.url}/v1/jobs/{submitted.id}/cancel")
        cancelled_s = time.monotonic()
        answered_s, job = answer.result()
    assert job["status"] == "cancelled"
    assert answered_s - cancelled_s < 0.5


def test_time_that_is_up_gives_the_job_as_it_is(server: ApiServer, submitted: Job) -> None:
    began_s = time.monotonic()
    answered_s, job = poll(server, submitted.id, 0.5)
    assert job["status"] == "queued"
    assert 0.5 <= answered_s - began_s < 1.5


def test_an_ended_job_is_not_waited_for(server: ApiServer, worker: HandWorker, submitted: Job) -> None:
    worker.run(submitted.id, "x", status=JobStatus.FAILED)
    began_s = time.monotonic()
    answered_s, job = poll(server, submitted.id)
    assert job["status"] == "failed"
    assert answered_s - began_s < 1


def test_a_client_that_leaves_ends_its_wait(server: ApiServer, submitted: Job) -> None:
    with httpx.Client() as client, pytest.raises(httpx.ReadTimeout):
        client.get(f"{server.url}/v1/jobs/{submitted.id}", params={"wait": 60}, timeout=0.3)
    until_waiting(server, 0)


def test_a_wait_is_cut_to_what_the_server_allows(database_url: str, broker_url: str, tmp_path: Path) -> None:
    upgrade(database_url)
    settings = api_settings(database_url, broker_url, tmp_path, max_wait_s=0.3)
    hand = HandWorker(Ledger(database_url), broker_url)
    hand.register()
    with ApiServer(settings).running() as server:
        job = httpx.post(f"{server.url}/v1/jobs", json={"model": "bytes", "prompt": "x"}).json()
        began_s = time.monotonic()
        answered_s, _ = poll(server, job["id"], 30)
    hand.close()
    assert answered_s - began_s < 2


def test_stopping_the_server_ends_waits_and_streams_at_once(server: ApiServer, submitted: Job) -> None:
    """Learned from bentoml and others: a graceful shutdown that waits for idle clients is a hang."""
    streamed: list[bytes] = []

    def stream() -> None:
        with httpx.stream("GET", f"{server.url}/v1/jobs/{submitted.id}/events", timeout=20) as response:
            streamed.extend(response.iter_bytes())

    with ThreadPoolExecutor() as pool:
        answer = pool.submit(poll, server, submitted.id, 60)
        events = pool.submit(stream)
        until_waiting(server, 2)
        assert server.stop() < 3
        _, job = answer.result(5)
        events.result(5)
    assert job["status"] == "queued"
    assert b"queued" in b"".join(streamed)


async def test_two_hundred_waiters_share_few_threads_and_all_wake(server: ApiServer, worker: HandWorker) -> None:
    limits = httpx.Limits(max_connections=250)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        ids = [(await client.post("/v1/jobs", json={"model": "bytes", "prompt": "x"})).json()["id"] for _ in range(20)]
        threads = threading.active_count()
        polls = [asyncio.create_task(client.get(f"/v1/jobs/{ids[i % 20]}", params={"wait": 50})) for i in range(200)]
        await asyncio.to_thread(until_waiting, server, 200)
        assert threading.active_count() < threads + 45
        began_s = time.monotonic()
        assert (await client.get("/healthz")).status_code == 200
        assert time.monotonic() - began_s < 0.5
        for job_id in ids:
            await asyncio.to_thread(worker.run, job_id, "x")
        answers = await asyncio.gather(*polls)
    assert {answer.json()["status"] for answer in answers} == {"succeeded"}
    await asyncio.to_thread(until_waiting, server, 0)


def test_waiters_survive_a_broker_that_goes_and_comes_back(broker: Broker, database_url: str, tmp_path: Path) -> None:
    """Learned from celery 10302: after a lost connection the subscription must come back by itself."""
    upgrade(database_url)
    hand = HandWorker(Ledger(database_url), broker.url)
    hand.register()
    with ApiServer(api_settings(database_url, broker.url, tmp_path)).running() as server:
        url = f"{server.url}/v1/jobs"
        jobs = [httpx.post(url, json={"model": "bytes", "prompt": "x"}).json()["id"] for _ in range(2)]
        for job_id in jobs:
            hand.start(job_id)
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(poll, server, jobs[0])
            until_waiting(server, 1)
            broker.kill()
            hand.commit(jobs[0], "while it was away")
            assert answer.result(10)[1]["status"] == "succeeded"
            broker.start()
            subscribed_by_s = time.monotonic() + 15
            while not hand.broker.pubsub_numsub("headrace:done")[0][1]:
                assert time.monotonic() < subscribed_by_s
                time.sleep(0.05)
            answer = pool.submit(poll, server, jobs[1])
            until_waiting(server, 1)
            hand.finish(jobs[1], "after it")
            finished_s = time.monotonic()
            answered_s, job = answer.result(10)
    hand.close()
    assert job["status"] == "succeeded"
    assert answered_s - finished_s < 0.5
