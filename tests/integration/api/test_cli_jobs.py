"""The commands about jobs, on a real server: several ids at once, and what a user is told when something is wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from headrace import Client
from headrace.contract import JobStatus
from typer.testing import CliRunner

from cli.main import app
from tests.integration.api.conftest import ApiServer

runner = CliRunner()


@pytest.fixture
def client(server: ApiServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


@pytest.fixture
def stranger() -> Iterator[str]:
    """A web server that is no Headrace."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def run(url: str, *arguments: str) -> Any:
    return runner.invoke(app, [*arguments, "--url", url])


def test_a_job_that_is_not_there_keeps_no_other_from_its_end_or_its_retry(client: Client, server: ApiServer) -> None:
    first, last = (client.submit("hello", model="bytes", max_tokens=4).id for _ in range(2))
    for action, after in (("cancel", JobStatus.CANCELLED), ("retry", JobStatus.QUEUED)):
        done = run(server.url, action, first, "nope", last, first)
        assert done.exit_code == 1
        assert [line.split()[0] for line in done.stdout.splitlines()] == [first, last]
        assert done.stderr == "there is no job 'nope'\n"
        assert [client.get(job).status for job in (first, last)] == [after, after]


def test_a_wrong_parameter_is_named_once(server: ApiServer) -> None:
    refused = run(server.url, "submit", "hello", "--model", "bytes", "--param", "logprob=1")
    assert refused.exit_code == 2
    assert refused.stderr == "error: logprob: unknown field\n"


def test_what_the_server_refuses_is_no_wrong_usage(server: ApiServer) -> None:
    refused = run(server.url, "submit", "word " * 5000, "--model", "bytes")
    assert refused.exit_code == 1
    assert refused.stderr.endswith("it and its output must fit into a context of 64\n")


def test_a_server_that_is_no_headrace_is_told_as_that(stranger: str) -> None:
    for arguments in (["jobs"], ["status", "x"], ["dlq", "list"]):
        done = run(stranger, *arguments)
        assert done.exit_code == 1
        assert f"what answers at {stranger} is no Headrace API: HTTP 404" in done.stderr
