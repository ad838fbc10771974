from __future__ import annotations

import httpx
import pytest
from headrace import flows
from headrace.errors import BadRequest, Conflict, NotFound, Unavailable
from headrace.flows import Backoff, Deadline, error_of


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
    [(400, BadRequest), (413, BadRequest), (404, NotFound), (409, Conflict), (429, Unavailable), (503, Unavailable)],
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


@pytest.mark.parametrize(("header", "most_s"), [("3", 3.0), ("9999", 15.0), ("soon", 0.1), ("", 0.1)])
def test_retry_after_is_followed_within_reason(header: str, most_s: float) -> None:
    response = httpx.Response(503, headers={"retry-after": header})
    assert flows.retry_after_s(response, Backoff(first_s=0.1)) <= most_s


@pytest.mark.parametrize(
    ("job_id", "path"), [("a", "/v1/jobs/a"), ("a/b", "/v1/jobs/a%2Fb"), ("ü?#", "/v1/jobs/%C3%BC%3F%23")]
)
def test_any_id_stays_inside_its_path(job_id: str, path: str) -> None:
    assert flows.job_path(job_id) == path
