"""Both HTTP clients against a real server, by the same tests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import pytest
from headrace import (
    AsyncClient,
    BadRequest,
    Client,
    Conflict,
    ConnectionFailed,
    HeadraceError,
    JobFailed,
    JobStatus,
    JobTimeout,
    NotFound,
    StateEvent,
    TokenEvent,
    Unavailable,
)
from headrace.flows import PACE_S

from tests.conftest import free_port
from tests.integration.api.conftest import ApiServer, HandWorker

T = TypeVar("T")


class Loop:
    """An event loop in a thread of its own, on which the asynchronous client runs."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Synchronous:
    """`AsyncClient` with the surface of `Client`, so that one test can drive both."""

    def __init__(self, client: AsyncClient, loop: Loop) -> None:
        self._client = client
        self._loop = loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            made = method(*args, **kwargs)
            return self._iterate(made) if hasattr(made, "__anext__") else self._loop.run(made)

        return called

    def _iterate(self, made: AsyncIterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield self._loop.run(_next(made))
            except StopAsyncIteration:
                return


async def _next(made: AsyncIterator[T]) -> T:
    return await anext(made)


Make = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes clients of one of the two kinds."""
    loop = Loop()
    opened: list[Client | AsyncClient] = []

    def new(url: str, **options: Any) -> Any:
        client = Client(url, **options) if request.param == "sync" else AsyncClient(url, **options)
        opened.append(client)
        return client if isinstance(client, Client) else Synchronous(client, loop)

    yield new
    for client in opened:
        if isinstance(client, Client):
            client.close()
        else:
            loop.run(client.aclose())
    loop.close()


@pytest.fixture
def client(make: Make, server: ApiServer) -> Any:
    return make(server.url)


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_submit_get_cancel_retry(client: Any) -> None:
    job = client.submit("hi", model="bytes", max_tokens=3, priority="high", metadata={"a": "b"})
    assert (job.status, job.priority, job.metadata) == (JobStatus.QUEUED, "high", {"a": "b"})
    assert client.get(job) == client.get(job.id) == job
    assert client.cancel(job).status is JobStatus.CANCELLED
    assert client.retry(job).status is JobStatus.QUEUED
    with pytest.raises(Conflict):
        client.retry(job)


def test_messages_and_token_ids(client: Any, worker: HandWorker) -> None:
    chat = client.submit(model="bytes", messages=[{"role": "user", "content": "hi"}])
    ids = client.submit([1, 2, 3], model="bytes")
    assert {chat.id, ids.id} == set(worker.wait_for_submitted(2))


def test_wait_gives_the_ended_job_whatever_its_end(client: Any, worker: HandWorker) -> None:
    good, bad = client.submit("a", model="bytes"), client.submit("b", model="bytes")
    worker.run(good.id, "text")
    worker.run(bad.id, "te", status=JobStatus.FAILED)
    assert client.wait(good).result.text == "text"
    assert client.wait(bad).status is JobStatus.FAILED


def test_wait_that_is_too_short(client: Any) -> None:
    job = client.submit("a", model="bytes")
    with pytest.raises(JobTimeout) as caught:
        client.wait(job, timeout=0.3)
    assert caught.value.job is not None
    assert caught.value.job.status is JobStatus.QUEUED
    assert isinstance(caught.value, TimeoutError)


def test_run(client: Any, worker: HandWorker, background: ThreadPoolExecutor) -> None:
    running = background.submit(client.run, "a", model="bytes", timeout=20)
    worker.run(worker.wait_for_submitted()[0], "done")
    assert running.result().result.text == "done"


def test_run_raises_what_went_wrong(client: Any, worker: HandWorker, background: ThreadPoolExecutor) -> None:
    running = background.submit(client.run, "a", model="bytes", timeout=20)
    worker.run(worker.wait_for_submitted()[0], "par", status=JobStatus.FAILED)
    with pytest.raises(JobFailed, match="it broke") as caught:
        running.result()
    assert caught.value.job.result is not None
    assert caught.value.job.result.text == "par"


def test_refusals_are_errors_with_their_field(client: Any) -> None:
    with pytest.raises(NotFound) as unknown:
        client.submit("a", model="nope")
    assert (unknown.value.code, unknown.value.param, unknown.value.status) == ("model_not_found", "model", 404)
    with pytest.raises(BadRequest) as long:
        client.submit("a" * 100, model="bytes")
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(BadRequest) as local:
        client.submit("a", model="bytes", top_p=3)
    assert local.value.param == "top_p"
    with pytest.raises(NotFound):
        client.get("a/b?c")
    with pytest.raises(ValueError, match="id"):
        client.get("")


def test_models(client: Any) -> None:
    assert [(card.id, card.chat) for card in client.models()] == [("bytes", True)]


def test_jobs_walks_all_pages(client: Any) -> None:
    made = [client.submit("a", model="bytes", tenant="t").id for _ in range(5)]
    client.submit("a", model="bytes", tenant="other")
    assert [job.id for job in client.jobs(tenant="t", page_size=2)] == made[::-1]
    assert list(client.jobs(status=JobStatus.FAILED)) == []


def test_stream_gives_the_text_as_it_comes(client: Any, worker: HandWorker) -> None:
    job = client.submit("a", model="bytes")
    worker.start(job.id)
    worker.write(job.id, 0, "one\u2028")
    pieces = client.stream(job)
    assert next(pieces) == "one\u2028"
    worker.write(job.id, 4, "two")
    assert next(pieces) == "two"
    worker.finish(job.id, "one\u2028two")
    assert list(pieces) == []


def test_stream_of_a_failed_job_gives_its_part_and_raises(client: Any, worker: HandWorker) -> None:
    job = client.submit("a", model="bytes")
    worker.run(job.id, "half", status=JobStatus.FAILED)
    pieces = client.stream(job)
    assert next(pieces) == "half"
    with pytest.raises(JobFailed, match="it broke"):
        next(pieces)


def test_stream_over_a_second_attempt_repeats_nothing(client: Any, worker: HandWorker) -> None:
    job = client.submit("a", model="bytes")
    worker.start(job.id, lease_s=0.05)
    worker.write(job.id, 0, "one tw")
    pieces = client.stream(job)
    assert next(pieces) == "one tw"
    time.sleep(0.1)
    worker.run(job.id, "one ", "two ", "three")
    assert "".join(pieces) == "o three"
    assert client.get(job).attempt == 2


def test_events(client: Any, worker: HandWorker) -> None:
    job = client.submit("a", model="bytes")
    worker.run(job.id, "x")
    kinds = [(type(e), getattr(e, "status", None)) for e in client.events(job)]
    assert kinds == [
        (StateEvent, JobStatus.RUNNING),
        (TokenEvent, None),
        (StateEvent, JobStatus.SUCCEEDED),
    ]


def test_stream_that_takes_too_long(client: Any) -> None:
    with pytest.raises(JobTimeout):
        list(client.stream(client.submit("a", model="bytes"), timeout=0.5))


def test_streams_of_unknown_jobs(client: Any) -> None:
    with pytest.raises(NotFound):
        list(client.stream("nope"))


def test_wait_and_stream_survive_a_restart_of_the_server(
    client: Any, server: ApiServer, worker: HandWorker, background: ThreadPoolExecutor
) -> None:
    job = client.submit("a", model="bytes")
    worker.start(job.id)
    worker.write(job.id, 0, "before ")
    waiting = background.submit(client.wait, job, 30)
    pieces = client.stream(job)
    assert next(pieces) == "before "
    server.stop()
    worker.write(job.id, 7, "meanwhile ")
    time.sleep(0.5)
    server.start()
    worker.write(job.id, 17, "after")
    worker.finish(job.id, "before meanwhile after")
    assert "".join(pieces) == "meanwhile after"
    assert waiting.result(30).result.text == "before meanwhile after"


def test_a_server_that_is_not_there(make: Make) -> None:
    client = make(f"http://127.0.0.1:{free_port()}", retries=1)
    with pytest.raises(ConnectionFailed):
        client.get("x")
    with pytest.raises(JobTimeout) as caught:
        client.wait("x", timeout=0.5)
    assert isinstance(caught.value.__cause__, ConnectionFailed | None)


class Scripted:
    """A transport of both kinds that answers from a list; the test's own httpx, no server."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.requests: list[httpx.Request] = []
        self._answers = list(answers)
        self.transport = httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def answer(code: int, **job: object) -> httpx.Response:
    fields = {
        "id": "j", "model": "m", "status": "queued", "priority": "low", "tenant": "t",
        "created_at": "2031-01-01T00:00:00Z",
    }  # fmt: skip
    return httpx.Response(code, json={**fields, **job})


def test_a_submission_is_repeated_with_the_same_key(make: Make) -> None:
    script = Scripted(httpx.ReadError("reset"), httpx.Response(503, headers={"retry-after": "0"}), answer(202))
    assert make("http://x", transport=script.transport).submit("a", model="m").id == "j"
    keys = {request.headers["idempotency-key"] for request in script.requests}
    assert len(script.requests) == 3
    assert len(keys) == 1


def test_the_users_own_key_stands_in_the_body_alone(make: Make) -> None:
    script = Scripted(answer(202))
    make("http://x", transport=script.transport).submit("a", model="m", idempotency_key="mine")
    assert "idempotency-key" not in script.requests[0].headers
    assert b'"idempotency_key":"mine"' in script.requests[0].content


def test_two_submissions_have_two_keys(make: Make) -> None:
    script = Scripted(answer(202), answer(202))
    client = make("http://x", transport=script.transport)
    client.submit("a", model="m")
    client.submit("a", model="m")
    assert len({request.headers["idempotency-key"] for request in script.requests}) == 2


def test_retries_end(make: Make) -> None:
    script = Scripted(*[httpx.Response(503, headers={"retry-after": "0"}, text="busy")] * 3)
    with pytest.raises(Unavailable, match="HTTP 503 from x: busy"):
        make("http://x", transport=script.transport, retries=2).get("j")
    assert len(script.requests) == 3


def test_a_retry_of_a_job_is_not_repeated(make: Make) -> None:
    script = Scripted(httpx.ReadError("reset"), answer(200))
    with pytest.raises(ConnectionFailed, match="reset"):
        make("http://x", transport=script.transport).retry("j")
    assert len(script.requests) == 1


def test_another_server_than_headrace_is_told(make: Make) -> None:
    script = Scripted(httpx.Response(200, text="<html>"))
    with pytest.raises(HeadraceError, match="something else than Headrace"):
        make("http://x", transport=script.transport).get("j")


def test_a_server_that_does_not_hold_long_polls_is_not_hammered(make: Make) -> None:
    """Without a timeout, near whose end pauses shrink: a busy machine only makes it take longer."""
    script = Scripted(*[answer(200)] * 3, answer(200, status="succeeded"))
    began_s = time.monotonic()
    assert make("http://x", transport=script.transport).wait("j").status is JobStatus.SUCCEEDED
    assert time.monotonic() - began_s > 3 * PACE_S - 0.05
    assert len(script.requests) == 4


def test_wait_passes_over_answers_of_a_restarting_proxy(make: Make) -> None:
    script = Scripted(httpx.Response(502), httpx.ConnectError("refused"), answer(200, status="failed"))
    assert make("http://x", transport=script.transport).wait("j", 10).status is JobStatus.FAILED
