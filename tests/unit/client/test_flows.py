from __future__ import annotations

import pickle
from typing import Any

import httpx
import pytest
from headrace import flows
from headrace.contract import JobRequest
from headrace.errors import BadRequest, Conflict, JobTimeout, NotFound, TooManyRequests, Unavailable
from headrace.flows import error_of
from headrace.waits import Backoff, Deadline


def test_delays_double_up_to_the_most_and_start_again_after_a_reset() -> None:
    backoff = Backoff(first_s=1.0, most_s=4.0)
    for bound in (1.0, 2.0, 4.0, 4.0):
        assert bound / 2 <= backoff.delay_s() <= bound
    backoff.reset()
    assert backoff.delay_s() <= 1.0


def test_a_deadline_may_never_come() -> None:
    assert Deadline(None).left_s() == float("inf")
    assert Deadline(0).left_s() == 0
    assert 0 < Deadline(5).left_s() <= 5


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequest),
        (413, BadRequest),
        (404, NotFound),
        (409, Conflict),
        (429, TooManyRequests),
        (503, Unavailable),
    ],
)
def test_the_status_decides_the_error(status: int, kind: type[Exception]) -> None:
    body = {"error": {"message": "m", "type": "t", "param": "p", "code": "c"}}
    error = error_of(httpx.Response(status, json=body, request=httpx.Request("GET", "http://x/y")))
    assert type(error) is kind
    assert (error.message, error.type, error.param, error.code, error.status) == ("m", "t", "p", "c", status)


@pytest.mark.parametrize("content", [b"", b"<html>Bad Gateway</html>", b"[]", b'{"error": "text"}', b"\xff"])
def test_an_error_of_a_proxy_is_told_as_it_is(content: bytes) -> None:
    error = error_of(httpx.Response(502, content=content, request=httpx.Request("GET", "http://x/y")))
    assert error.message.startswith("HTTP 502 from x")
    assert error.status == 502


@pytest.mark.parametrize(("header", "most_s"), [("3", 3.3), ("9999", 16.5), ("soon", 0.1), ("", 0.1)])
def test_retry_after_is_followed_within_reason(header: str, most_s: float) -> None:
    response = httpx.Response(503, headers={"retry-after": header})
    assert flows.retry_after_s(response, Backoff(first_s=0.1)) <= most_s


@pytest.mark.parametrize(
    ("job_id", "path"), [("a", "/v1/jobs/a"), ("a/b", "/v1/jobs/a%2Fb"), ("ü?#", "/v1/jobs/%C3%BC%3F%23")]
)
def test_any_id_stays_inside_its_path(job_id: str, path: str) -> None:
    assert flows.job_path(job_id) == path


def answers(flow: flows.Flow[Any], status: int, **headers: str) -> list[type]:
    """What a flow does while every request is answered in the same way, until it gives up."""
    did = [type(next(flow))]
    body = {"error": {"message": "m", "type": "t"}}
    answer = httpx.Response(status, json=body, headers=headers, request=httpx.Request("POST", "http://x/y"))
    while True:
        try:
            effect = flow.send(answer if did[-1] is flows.Send else None)
        except Unavailable:
            return did
        did.append(type(effect))


def test_a_full_queue_is_waited_for_however_often_the_client_retries_other_things() -> None:
    flow = flows.submit(JobRequest(model="m", prompt="x", ttl_s=3600), retries=0)
    effect = next(flow)
    for _ in range(20):
        assert isinstance(effect, flows.Send)
        busy = httpx.Response(429, headers={"retry-after": "4"}, request=httpx.Request("POST", "http://x/y"))
        pause = flow.send(busy)
        assert isinstance(pause, flows.Sleep)
        assert 4 <= pause.seconds <= 4.4
        effect = flow.send(None)


def test_a_pause_that_is_longer_than_the_time_left_is_not_begun() -> None:
    did = answers(flows.submit(JobRequest(model="m", prompt="x", ttl_s=2), retries=3), 429, **{"retry-after": "5"})
    assert did == [flows.Send]
    did = answers(flows.submit(JobRequest(model="m", prompt="x"), 3, timeout_s=2), 429, **{"retry-after": "5"})
    assert did == [flows.Send]


def test_without_a_deadline_a_full_queue_is_tried_as_often_as_anything_else() -> None:
    did = answers(flows.submit(JobRequest(model="m", prompt="x"), retries=2), 429, **{"retry-after": "5"})
    assert did == [flows.Send, flows.Sleep] * 2 + [flows.Send]


def test_the_error_tells_how_long_to_wait_and_survives_pickling() -> None:
    answer = httpx.Response(429, headers={"retry-after": "7"}, request=httpx.Request("GET", "http://x/y"))
    error = pickle.loads(pickle.dumps(error_of(answer)))
    assert isinstance(error, TooManyRequests)
    assert error.retry_after_s == 7


@pytest.mark.parametrize(("timeout_s", "told"), [(0.968207, "1 s"), (12.34, "12.3 s"), (3600.0, "3600 s"), (0, "0 s")])
def test_a_timeout_is_told_in_round_seconds(timeout_s: float, told: str) -> None:
    assert str(JobTimeout("j", timeout_s)) == f"job j had not ended after {told}"
