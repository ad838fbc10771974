"""What the client sends and how it reads the answers, without I/O.

A flow is a generator: it yields `Send` and `Sleep`, is given the `httpx.Response` (or is thrown
`ConnectionFailed`), and returns the parsed result. `Client` and `AsyncClient` only perform these effects.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from headrace.contract import DeadLetter, ErrorBody, Job, JobPage, JobRequest, JobStatus, ModelCard, job_kwargs
from headrace.errors import ApiError, ConnectionFailed, HeadraceError, JobFailed, api_error
from headrace.tracing import TRACEPARENT, current
from headrace.waits import Backoff, Deadline, patience

LONG_POLL_S = 30.0
"""One request of a wait; the server may cut it shorter."""
MARGIN_S = 5.0
"""How much later than asked a long-poll may be answered."""
PACE_S = 0.2
"""Least time between two polls of a server that does not hold them."""
RETRYABLE = frozenset({429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Send:
    """A request to perform. `silence_s` is the longest time without a byte, if it isn't the client's timeout."""

    method: str
    path: str
    params: Mapping[str, str | int | float] = field(default_factory=dict)
    json: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    silence_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Flow = Generator[Send | Sleep, Any, T]


class ModelList(BaseModel):
    """Answer of `GET /v1/models`."""

    data: list[ModelCard]


def headers(api_key: str | None, more: Mapping[str, str] | None) -> dict[str, str]:
    """The headers of every request: the key of `api_key` or HEADRACE_API_KEY, unless `more` has an Authorization."""
    key = (os.environ.get("HEADRACE_API_KEY", "") if api_key is None else api_key).strip()
    if not key:
        return dict(more or {})
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("the API key can't be right: it holds characters that no key has")
    return {"Authorization": f"Bearer {key}", **(more or {})}


def job_id_of(job: str | Job) -> str:
    job_id = job if isinstance(job, str) else job.id
    if not job_id:
        raise ValueError("a job id is not empty")
    return job_id


def job_path(job_id: str, action: str = "") -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}{action}"


def build(http: httpx.Client | httpx.AsyncClient, request: Send, timeout_s: float) -> httpx.Request:
    silence_s = timeout_s if request.silence_s is None else request.silence_s
    return http.build_request(
        request.method,
        request.path,
        params=request.params or None,
        json=request.json,
        headers=request.headers,
        timeout=httpx.Timeout(timeout_s, read=silence_s),
    )


def connection_failed(request: httpx.Request, error: httpx.RequestError) -> ConnectionFailed:
    return ConnectionFailed(f"{request.method} {request.url}: {str(error) or type(error).__name__}")


def error_of(response: httpx.Response) -> ApiError:
    """The error in an answer, whoever wrote it (a proxy may have)."""
    try:
        body = ErrorBody.model_validate(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        text = response.text.strip()[:200]
        message = f"HTTP {response.status_code} from {response.request.url.host}" + (f": {text}" if text else "")
        body = ErrorBody(message=message, type="api_error")
    return api_error(response.status_code, body, asked_pause_s(response))


def parse(response: httpx.Response, model: type[M]) -> M:
    if response.status_code >= 400:
        raise error_of(response)
    try:
        return model.model_validate_json(response.content)
    except ValidationError as error:
        raise HeadraceError(f"{response.request.url} answered something else than Headrace does: {error}") from error


def call(request: Send, model: type[M], retries: int, deadline: Deadline | None = None) -> Flow[M]:
    """Send, again after a lost connection or a passing error, at most `retries` times more.

    With a deadline, "too much" (429) is waited out for as long as there is time.
    """
    backoff = Backoff()
    while True:
        try:
            response: httpx.Response = yield request
        except ConnectionFailed:
            if retries == 0:
                raise
            delay_s = backoff.delay_s()
            retries -= 1
        else:
            delay_s = retry_after_s(response, backoff)
            patient = deadline is not None and response.status_code == httpx.codes.TOO_MANY_REQUESTS
            spent = delay_s >= deadline.left_s() if deadline is not None and patient else retries == 0
            if response.status_code not in RETRYABLE or spent:
                return parse(response, model)
            retries -= not patient
        yield Sleep(delay_s)


def asked_pause_s(response: httpx.Response) -> float | None:
    """`Retry-After`, if it is a number of seconds."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else None


def retry_after_s(response: httpx.Response, backoff: Backoff) -> float:
    """What the server asks for, but never more than a quarter of a minute, and never all at the same moment."""
    asked_s = asked_pause_s(response)
    return backoff.delay_s() if asked_s is None else min(asked_s, 15.0) * random.uniform(1.0, 1.1)  # noqa: S311 - jitter


def submit(request: JobRequest, retries: int, timeout_s: float | None = None) -> Flow[Job]:
    """A full queue is waited for until `timeout_s`, or the job's own deadline, would pass.

    The current span is told in a header: a server that knows nothing of traces takes the job all the same.
    """
    headers = {} if request.idempotency_key else {"Idempotency-Key": str(uuid.uuid4())}
    if request.traceparent is None and (traceparent := current()):
        headers[TRACEPARENT] = traceparent
    send = Send("POST", "/v1/jobs", json=job_kwargs(request), headers=headers)
    return call(send, Job, retries, patience(request, timeout_s))


def get(job_id: str, retries: int) -> Flow[Job]:
    return call(Send("GET", job_path(job_id)), Job, retries)


def wait(job_id: str, timeout_s: float | None) -> Flow[Job]:
    """Poll until the job has ended; lost connections and passing errors count as time gone by."""
    deadline, backoff = Deadline(timeout_s), Backoff()
    job: Job | None = None
    while True:
        held_s = min(deadline.left_s(), LONG_POLL_S)
        sent_s = time.monotonic()
        try:
            response: httpx.Response = yield _long_poll(job_id, held_s)
        except ConnectionFailed as error:
            if deadline.left_s() == 0:
                raise deadline.error(job_id, job) from error
            delay_s = backoff.delay_s()
        else:
            if response.status_code in RETRYABLE:
                delay_s = retry_after_s(response, backoff)
            else:
                backoff.reset()
                job = parse(response, Job)
                if job.status.terminal:
                    return job
                delay_s = max(0.0, min(PACE_S, held_s) - (time.monotonic() - sent_s))
            if deadline.left_s() == 0:
                raise deadline.error(job_id, job)
        yield Sleep(min(delay_s, deadline.left_s()))


def _long_poll(job_id: str, held_s: float) -> Send:
    return Send("GET", job_path(job_id), {"wait": round(held_s, 3)}, silence_s=held_s + MARGIN_S)


def run(request: JobRequest, timeout_s: float | None, retries: int) -> Flow[Job]:
    """Submit, wait, and raise JobFailed unless it succeeded."""
    deadline = Deadline(timeout_s)
    job = yield from submit(request, retries, timeout_s)
    job = yield from wait(job.id, None if timeout_s is None else deadline.left_s())
    if job.status is not JobStatus.SUCCEEDED:
        raise JobFailed(job)
    return job


def cancel(job_id: str, retries: int) -> Flow[Job]:
    return call(Send("POST", job_path(job_id, "/cancel")), Job, retries)


def retry(job_id: str) -> Flow[Job]:
    """Not repeated by itself: a repetition could start the job once more after it had failed again."""
    return call(Send("POST", job_path(job_id, "/retry")), Job, retries=0)


def page(
    status: JobStatus | str | None, model: str | None, tenant: str | None, limit: int, after: str | None, retries: int
) -> Flow[JobPage]:
    given = {"status": status, "model": model, "tenant": tenant, "after": after}
    params = {key: str(value) for key, value in given.items() if value is not None}
    return call(Send("GET", "/v1/jobs", {**params, "limit": limit}), JobPage, retries)


def models(retries: int) -> Flow[ModelList]:
    return call(Send("GET", "/v1/models"), ModelList, retries)


def dead_letters(
    model: str | None, tenant: str | None, older_than_s: float | None, limit: int, after: str | None, retries: int
) -> Flow[JobPage]:
    given = {"model": model, "tenant": tenant, "older_than_s": older_than_s, "after": after}
    params = {key: str(value) for key, value in given.items() if value is not None}
    return call(Send("GET", "/v1/dead-letters", {**params, "limit": limit}), JobPage, retries)


def dead_letter(job_id: str, retries: int) -> Flow[DeadLetter]:
    return call(Send("GET", dead_letter_path(job_id)), DeadLetter, retries)


def replay(job_id: str) -> Flow[Job]:
    """Not repeated by itself, as `retry` isn't."""
    return call(Send("POST", dead_letter_path(job_id) + "/replay"), Job, retries=0)


def purge(job_id: str) -> Flow[Job]:
    """Not repeated by itself: the second answer would be that there is no such job."""
    return call(Send("DELETE", dead_letter_path(job_id)), Job, retries=0)


def dead_letter_path(job_id: str) -> str:
    return f"/v1/dead-letters/{quote(job_id, safe='')}"
