"""Server-sent events: replay, fallback to the ledger, and the end."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from headrace.contract import Choice, Job, JobResult, JobStatus
from headrace.wire import stream_key

from ledger import Ledger
from ledger.contract import Outcome
from ledger.migrate import upgrade
from tests.conftest import Broker
from tests.integration.api.conftest import ApiServer, HandWorker, api_settings

PIECES = ["The ", "sky\u2028", "is \U0001f600", "\n\ndata: blue", "."]


def frames(response: httpx.Response, stop_after: int | None = None) -> list[bytes]:
    """Whole frames without comments."""
    found: list[bytes] = []
    rest = b""
    for chunk in response.iter_bytes():
        *whole, rest = (rest + chunk).split(b"\n\n")
        found += [frame for frame in whole if not frame.startswith(b":")]
        if stop_after is not None and len(found) >= stop_after:
            return found[:stop_after]
    return found


def read(server: ApiServer, job_id: str, last_id: str | None = None, stop_after: int | None = None) -> list[bytes]:
    headers = {"Last-Event-ID": last_id} if last_id else {}
    with httpx.stream("GET", f"{server.url}/v1/jobs/{job_id}/events", headers=headers, timeout=20) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return frames(response, stop_after)


def parsed(frame: bytes) -> dict[str, Any]:
    fields = dict(line.split(": ", 1) for line in frame.decode().split("\n"))
    event: dict[str, Any] = json.loads(fields["data"])
    assert fields["event"] == event["event"]
    return {**event, "id": fields.get("id")}


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in events if event["event"] == "token")


def states_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["status"] for event in events if event["event"] == "state"]


def test_a_queued_job_is_followed_to_its_end(server: ApiServer, worker: HandWorker, submitted: Job) -> None:
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read, server, submitted.id)
        time.sleep(0.3)
        worker.run(submitted.id, *PIECES)
        events = [parsed(frame) for frame in reading.result(10)]
    assert states_of(events) == ["queued", "running", "succeeded"]
    assert text_of(events) == "".join(PIECES)
    assert events[-1]["job"]["id"] == submitted.id
    assert events[-1]["job"]["result"]["text"] == "".join(PIECES)
    assert events[0]["id"] is None
    assert all(event["id"] for event in events[1:])


def test_tokens_arrive_while_the_job_runs(server: ApiServer, worker: HandWorker, submitted: Job) -> None:
    worker.start(submitted.id)
    worker.write(submitted.id, 0, "early")
    events = [parsed(frame) for frame in read(server, submitted.id, stop_after=3)]
    assert states_of(events) == ["running", "running"]
    assert text_of(events) == "early"


def test_a_finished_job_is_replayed_whole(server: ApiServer, worker: HandWorker, submitted: Job) -> None:
    worker.run(submitted.id, *PIECES)
    events = [parsed(frame) for frame in read(server, submitted.id)]
    assert states_of(events) == ["running", "succeeded"]
    assert text_of(events) == "".join(PIECES)


def test_reading_on_after_any_event_gives_the_same_bytes(server: ApiServer, worker: HandWorker, submitted: Job) -> None:
    worker.run(submitted.id, *PIECES)
    whole = read(server, submitted.id)
    assert len(whole) == len(PIECES) + 2
    for i in range(len(whole) - 1):
        assert read(server, submitted.id, last_id=parsed(whole[i])["id"]) == whole[i + 1 :]


def test_a_reader_that_is_cut_off_and_comes_back_loses_nothing(
    server: ApiServer, worker: HandWorker, submitted: Job
) -> None:
    worker.start(submitted.id)
    worker.write(submitted.id, 0, "one ")
    first = read(server, submitted.id, stop_after=3)[1:]
    worker.write(submitted.id, 4, "two ")
    second = read(server, submitted.id, last_id=parsed(first[-1])["id"], stop_after=2)[1:]
    worker.write(submitted.id, 8, "three")
    worker.finish(submitted.id, "one two three")
    third = read(server, submitted.id, last_id=parsed(second[-1])["id"])
    assert first + second + third == read(server, submitted.id)


def test_without_its_stream_the_ledger_gives_the_text(server: ApiServer, worker: HandWorker, submitted: Job) -> None:
    worker.run(submitted.id, *PIECES)
    worker.broker.delete(stream_key(submitted.id))
    events = [parsed(frame) for frame in read(server, submitted.id)]
    assert (states_of(events), text_of(events)) == (["succeeded"], "".join(PIECES))
    resumed = [parsed(frame) for frame in read(server, submitted.id, last_id="5-0")]
    assert [event["offset"] for event in resumed if event["event"] == "token"] == [0]


def test_the_text_that_the_stream_lost_comes_from_the_ledger(
    server: ApiServer, worker: HandWorker, submitted: Job
) -> None:
    worker.start(submitted.id)
    worker.write(submitted.id, 0, "seen ")
    worker.commit(submitted.id, "seen and unseen")
    events = [parsed(frame) for frame in read(server, submitted.id)]
    assert [event["offset"] for event in events if event["event"] == "token"] == [0, 5]
    assert text_of(events) == "seen and unseen"
    assert states_of(events) == ["running", "succeeded"]


def test_each_completion_is_told_to_its_end(server: ApiServer, worker: HandWorker, submitted: Job) -> None:
    """The stream has some of the first and nothing of the second."""
    lease = worker.start(submitted.id)
    first = worker.write(submitted.id, 0, "one ")
    result = JobResult(
        text="one two", choices=[Choice(index=0, text="one two"), Choice(index=1, text="three")], finish_reason="stop"
    )
    assert worker.ledger.commit([Outcome(lease, JobStatus.SUCCEEDED, result)]) == [True]
    expected = [(0, 0, "one "), (0, 4, "two"), (1, 0, "three")]

    def told(last_id: str | None = None) -> list[tuple[int, int, str]]:
        events = [parsed(frame) for frame in read(server, submitted.id, last_id)]
        return [(e["index"], e["offset"], e["text"]) for e in events if e["event"] == "token"]

    assert told() == expected
    assert told(first) == [], "what a reader had before is not known: it reads the job's end"
    worker.broker.delete(stream_key(submitted.id))
    assert told() == [(0, 0, "one two"), (1, 0, "three")]


def test_a_job_that_publishes_no_tokens_gives_its_text_at_the_end(
    server: ApiServer, worker: HandWorker, submitted: Job
) -> None:
    worker.start(submitted.id)
    worker.finish(submitted.id, "all at once")
    assert text_of([parsed(frame) for frame in read(server, submitted.id)]) == "all at once"


def test_an_end_in_the_queue_is_told(server: ApiServer, submitted: Job) -> None:
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read, server, submitted.id)
        time.sleep(0.3)
        httpx.post(f"{server.url}/v1/jobs/{submitted.id}/cancel")
        events = [parsed(frame) for frame in reading.result(5)]
    assert states_of(events) == ["queued", "cancelled"]
    assert events[-1]["job"]["error"]["code"] == "cancelled"


def test_a_failed_attempt_of_a_retried_job_does_not_end_the_stream(
    server: ApiServer, worker: HandWorker, submitted: Job
) -> None:
    worker.run(submitted.id, "a", status=JobStatus.FAILED)
    httpx.post(f"{server.url}/v1/jobs/{submitted.id}/retry")
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read, server, submitted.id)
        time.sleep(0.3)
        worker.run(submitted.id, "a", "b")
        events = [parsed(frame) for frame in reading.result(5)]
    assert states_of(events) == ["queued", "running", "running", "succeeded"]


def test_garbage_in_the_stream_is_passed_over(server: ApiServer, worker: HandWorker, submitted: Job) -> None:
    worker.start(submitted.id)
    worker.broker.xadd(stream_key(submitted.id), {"event": "{not json"})
    worker.broker.xadd(stream_key(submitted.id), {"other": "field"})
    worker.write(submitted.id, 0, "good")
    worker.finish(submitted.id, "good")
    assert text_of([parsed(frame) for frame in read(server, submitted.id)]) == "good"


def test_a_reader_that_leaves_frees_what_it_held(server: ApiServer, worker: HandWorker, submitted: Job) -> None:
    gone = threading.Event()

    def leave() -> None:
        read(server, submitted.id, stop_after=1)
        gone.set()

    threads = [threading.Thread(target=leave) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    until_s = time.monotonic() + 5
    while "headrace_api_waiters 0.0" not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < until_s
        time.sleep(0.05)


async def test_hundreds_of_readers_share_a_few_broker_connections(
    server: ApiServer, worker: HandWorker, submitted: Job
) -> None:
    async def follow(client: httpx.AsyncClient) -> bytes:
        async with client.stream("GET", f"/v1/jobs/{submitted.id}/events") as response:
            return b"".join([chunk async for chunk in response.aiter_bytes()])

    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        readers = [asyncio.create_task(follow(client)) for _ in range(150)]
        while "headrace_api_waiters 150.0" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        assert worker.broker.info("clients")["connected_clients"] < 80
        await asyncio.to_thread(worker.run, submitted.id, "a", "b")
        assert len(set(await asyncio.gather(*readers))) == 1


def test_events_are_told_from_the_ledger_while_the_broker_is_away(
    broker: Broker, database_url: str, tmp_path: Path
) -> None:
    upgrade(database_url)
    hand = HandWorker(Ledger(database_url), broker.url)
    hand.register()
    with ApiServer(api_settings(database_url, broker.url, tmp_path)).running() as server:
        job_id = httpx.post(f"{server.url}/v1/jobs", json={"model": "bytes", "prompt": "x"}).json()["id"]
        hand.start(job_id)
        hand.write(job_id, 0, "first ")
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(read, server, job_id)
            time.sleep(0.3)
            broker.kill()
            hand.commit(job_id, "first and last")
            events = [parsed(frame) for frame in reading.result(20)]
    hand.close()
    assert text_of(events) == "first and last"
    assert states_of(events)[-1] == "succeeded"


def test_a_silent_stream_says_that_it_is_there(
    server: ApiServer, submitted: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.follow.SPEAK_S", 0.1)
    with httpx.stream("GET", f"{server.url}/v1/jobs/{submitted.id}/events", timeout=5) as response:
        chunks = response.iter_bytes()
        assert b'"queued"' in next(chunks)
        assert next(chunks) == b": still here\n\n"


def test_a_broker_that_says_nothing_silences_no_stream_and_no_route(
    broker: Broker, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.door.SILENCE_S", 0.5)
    monkeypatch.setattr("api.follow.SPEAK_S", 0.5)
    upgrade(database_url)
    hand = HandWorker(Ledger(database_url), broker.url)
    hand.register()
    with ApiServer(api_settings(database_url, broker.url, tmp_path)).running() as server:
        body = {"model": "bytes", "prompt": "x"}
        job_id = httpx.post(f"{server.url}/v1/jobs", json=body).json()["id"]
        hand.start(job_id)
        with httpx.stream("GET", f"{server.url}/v1/jobs/{job_id}/events", timeout=5) as response:
            chunks = response.iter_bytes()
            assert b'"queued"' in next(chunks) or b'"running"' in next(chunks)
            broker.kill(signal.SIGSTOP)
            assert any(next(chunks) == b": still here\n\n" for _ in range(5))
            hand.commit(job_id, "the end")
            assert b"the end" in b"".join(chunks)
        assert httpx.post(f"{server.url}/v1/jobs", json=body, timeout=5).status_code == 202
        assert httpx.get(f"{server.url}/v1/queues", timeout=5).status_code == 503
        broker.kill(signal.SIGCONT)
    hand.close()
