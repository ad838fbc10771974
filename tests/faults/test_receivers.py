"""Somebody wants to hear of a job and then takes nothing of it: neither the worker nor the cancel waits for that."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
from headrace.contract import JobStatus
from headrace.wire import stream_key

from ledger.migrate import upgrade
from tests.conftest import Broker
from tests.faults.stage import Stage, go_on, state_of
from tests.workers import MODEL, eventually

pytestmark = pytest.mark.slow

LONG = 3000
"""Tokens that take longer than any test."""
TEXTS = 16
"""Completions of the long job: so many events in each step."""
BACKLOG = 64 * 1024
"""Bytes that no reader who takes any leaves untaken."""
READ_EVENTS = """
import sys, httpx
with httpx.stream("GET", sys.argv[1], timeout=None) as response:
    for chunk in response.iter_raw():
        print("read", flush=True)
"""
AWAIT_RESULT = """
import sys
from headrace import Producer
with Producer(sys.argv[1]) as producer:
    producer.wait(sys.argv[2])
"""


@pytest.fixture
def stage(broker: Broker, database_url: str, tmp_path: Path) -> Iterator[Stage]:
    """One worker: all jobs are beside the one that is listened to."""
    upgrade(database_url)
    stage = Stage.open(broker, database_url, tmp_path, workers=1)
    yield stage
    stage.close()


@contextlib.contextmanager
def never_reads(stage: Stage, job_id: str) -> Iterator[None]:
    """Asks for the job's events, and leaves them in its socket."""
    door = httpx.URL(stage.api.url)
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((door.host, door.port))
        reader.sendall(f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: {door.host}:{door.port}\r\n\r\n".encode())
        eventually(lambda: untaken(stage) > BACKLOG, 20, "its socket is full")
        yield


@contextlib.contextmanager
def stopped_reader(stage: Stage, job_id: str) -> Iterator[None]:
    """Reads the job's events, and then stands still."""
    with process(READ_EVENTS, f"{stage.api.url}/v1/jobs/{job_id}/events") as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"read\n"
        stop(reader)
        eventually(lambda: untaken(stage) > BACKLOG, 20, "its socket is full")
        yield


@contextlib.contextmanager
def stopped_waiter(stage: Stage, job_id: str) -> Iterator[None]:
    """Waits for the job's result at Celery's backend, and then stands still."""
    channel = f"celery-task-meta-{job_id}"
    with process(AWAIT_RESULT, stage.broker.url, job_id) as waiter:
        eventually(lambda: dict(stage.place.redis.pubsub_numsub(channel))[channel.encode()], 15, "it waits")
        stop(waiter)
        yield


@contextlib.contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
    with started:
        try:
            yield started
        finally:
            started.kill()
            go_on(started.pid)


def stop(receiver: subprocess.Popen[bytes]) -> None:
    os.kill(receiver.pid, signal.SIGSTOP)
    eventually(lambda: state_of(receiver.pid) == "T", 5, "it stands still")


def untaken(stage: Stage) -> int:
    """Bytes that the API has for its clients, and that these have no room for."""
    mine, connected = f":{httpx.URL(stage.api.url).port:04X}", "01"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return sum(int(row[4].partition(":")[0], 16) for row in rows if row[1].endswith(mine) and row[3] == connected)


@pytest.mark.parametrize("receiver", [never_reads, stopped_reader, stopped_waiter])
def test_who_takes_nothing_delays_no_other_job_and_no_cancel(
    stage: Stage, receiver: Callable[[Stage, str], AbstractContextManager[None]]
) -> None:
    """cog 2229: a receiver that is dead blocks the worker, and the cancel of the very job."""
    long = stage.client.submit("hello", model=MODEL, max_tokens=LONG, n=TEXTS, ignore_eos=True)
    stage.place.running(long.id)
    with receiver(stage, long.id):
        told = stage.place.redis.xlen(stream_key(long.id))
        stage.submit(8)
        assert {job.status for job in stage.ended(within_s=10)} == {JobStatus.SUCCEEDED}
        assert stage.place.job(long.id).status is JobStatus.RUNNING
        eventually(lambda: stage.place.redis.xlen(stream_key(long.id)) > told + 10 * TEXTS, 10, "it goes on as well")
        assert stage.client.cancel(long).cancel_requested
        ended = stage.place.ended(long.id, within_s=5)
        assert ended.status is JobStatus.CANCELLED
        stage.assert_nothing_left()
    assert ended.result is not None
    assert ended.result.text
