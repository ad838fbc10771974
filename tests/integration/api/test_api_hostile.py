"""No input makes the door answer anything but a clear refusal."""

from __future__ import annotations

import json
import socket
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from headrace.contract import Job

from ledger import Ledger
from settings import Settings
from tests.integration.api.conftest import ApiServer, HandWorker


@pytest.fixture(scope="module")
def hostile_server(module_settings: Settings) -> Iterator[ApiServer]:
    """One server for the whole table: no test here minds what the others leave."""
    hand = HandWorker(Ledger(module_settings.ledger_url), module_settings.broker_url)
    hand.register()
    with ApiServer(module_settings).running() as running:
        yield running
    hand.close()


@pytest.fixture
def http(hostile_server: ApiServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hostile_server.url, timeout=20) as client:
        yield client


OK = {"model": "bytes", "prompt": "x"}
JSON = {"content-type": "application/json"}


def test_a_page_whose_name_was_pointed_at_this_machine_gets_nothing(http: httpx.Client) -> None:
    """DNS rebinding: the browser takes the door for the page's own site, and lets it read the answers."""
    evil = {"host": "evil.example:8000"}
    before = http.get("/v1/jobs", headers={"host": "localhost:8000"}).json()
    for response in (http.get("/v1/jobs", headers=evil), http.post("/v1/jobs", json=OK, headers=evil)):
        assert (response.status_code, response.json()["error"]["code"]) == (403, "unknown_host")
    assert http.get("/v1/jobs").json() == before


def refusal(response: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["message"]
    return found


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"   ", "empty"),
        (b"{", "not valid JSON"),
        (b'{"model": "bytes", "prompt": "x"} trailing', "not valid JSON"),
        (b'{"model": "bytes", "prompt": "\xff\xfe"}', "not valid JSON"),
        (b'{"model": "bytes", "prompt": "\\ud800"}', "not valid JSON"),
        (b'\xef\xbb\xbf{"model": "bytes"}', "not valid JSON"),
        (b'{"model": "bytes", "prompt": "x", "temperature": NaN}', "not valid JSON"),
        (b'{"model": "bytes", "prompt": "x", "temperature": Infinity}', "not valid JSON"),
        (b'{"model": "bytes", "prompt": "x", "temperature": -Infinity}', "not valid JSON"),
        (b'{"model": "bytes", "prompt": "x", "prompt": "y"}', "stands twice"),
        (b'{"model": "bytes", "prompt": "x", "metadata": {"a": "1", "a": "2"}}', "stands twice"),
        (b"[" * 50_000, "not valid JSON"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "not valid JSON"),
        (b"[" * 40_000 + b"]" * 40_000, "not valid JSON"),
        (b"9" * 5_000, "not valid JSON"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (b'"prompt"', "JSON object"),
        (b"{}", "field required"),
    ],
)
def test_bodies_that_are_not_a_request(http: httpx.Client, body: bytes, says: str) -> None:
    response = http.post("/v1/jobs", content=body, headers=JSON)
    assert response.status_code == 400, response.text
    assert says in refusal(response)["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e400}, None),
        ({"temperature": -0.1}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"top_k": -2}, "top_k"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1e300}}, "logit_bias.1"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"allowed_token_ids": [1, 300]}, "allowed_token_ids"),
        ({"allowed_token_ids": [256], "min_tokens": 1}, "allowed_token_ids"),
        ({"bad_words": "no"}, "bad_words"),
        ({"n": 0}, "n"),
        ({"n": 2.0}, "n"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, None),
        ({"guided_grammar": "start: nope"}, "guided_grammar"),
        ({"guided_choice": [1]}, "guided_choice.0"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [2**64]}, None),
        ({"prompt": None}, None),
        ({"messages": []}, "messages"),
        ({"prompt": None, "messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content"),
        ({"prompt": None, "messages": [{"role": "user"}]}, "messages.0.content"),
        ({"model": ""}, "model"),
        ({"model": "../../etc/passwd"}, "model"),
        ({"model": "x" * 129}, "model"),
        ({"model": "a\x00b"}, "model"),
        ({"tenant": "a b"}, "tenant"),
        ({"priority": 0}, "priority"),
        ({"priority": "urgent"}, "priority"),
        ({"deadline": "tomorrow"}, "deadline"),
        ({"deadline": "2000-01-01T00:00:00Z"}, "deadline"),
        ({"deadline": "0001-01-01T00:00:00+14:00"}, "deadline"),
        ({"deadline": "9999-12-31T23:59:59-14:00"}, "deadline"),
        ({"deadline": 0}, "deadline"),
        ({"deadline": 1e300}, "deadline"),
        ({"deadline": "9999-12-31T23:59:59+00:00", "ttl_s": 1}, None),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": 1e300}, "ttl_s"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"metadata": {"a": None}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"idempotency_key": "k" * 256}, "idempotency_key"),
        ({"idempotency_key": "\x00"}, "idempotency_key"),
        ({"unknown": 1}, "unknown"),
        ({"": 1}, None),
    ],
)
def test_fields_that_are_wrong(http: httpx.Client, fields: dict[str, Any], param: str | None) -> None:
    body = {key: value for key, value in {**OK, **fields}.items() if value is not None}
    response = http.post("/v1/jobs", content=json.dumps(body).replace("Infinity", "1e400"), headers=JSON)
    assert response.status_code == 400, response.text
    if param is not None:
        assert refusal(response)["param"] == param, response.text


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a\x00b"},
        {"metadata": {"nul": "\x00", "\x00": "nul"}},
        {"idempotency_key": "\u2028\U0001f600"},
        {"stop": "\x00"},
        {"prompt": "\u2028\x85\ufeff\U0010ffff"},
        {"deadline": "9999-12-31T23:59:59+00:00"},
        {"seed": 2**63 - 1},
        {"max_tokens": 2**70},
    ],
)
def test_strange_but_allowed_values_are_kept_or_refused_and_never_a_fault(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    response = http.post("/v1/jobs", json={**OK, **fields})
    assert response.status_code in (202, 400), response.text
    if response.status_code == 202:
        job = http.get(response.headers["location"]).json()
        assert job["metadata"] == fields.get("metadata", {})


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=latin1"]
)
def test_bodies_must_be_declared_as_json(http: httpx.Client, kind: str) -> None:
    response = http.post("/v1/jobs", content=json.dumps(OK), headers={"content-type": kind})
    assert response.status_code == 415
    assert refusal(response)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=UTF-8", "application/vnd.x+json"])
def test_json_by_any_name_is_taken(http: httpx.Client, kind: str) -> None:
    assert http.post("/v1/jobs", content=json.dumps(OK), headers={"content-type": kind}).status_code == 202


def test_a_large_body_is_refused_before_it_is_sent(http: httpx.Client) -> None:
    """celery 6533, celery 7912."""
    response = http.post("/v1/jobs", content=b"x" * 100_001, headers=JSON)
    assert response.status_code == 413
    assert "100000 bytes" in refusal(response)["message"]


def test_a_large_body_without_a_length_is_refused_while_it_comes_and_is_not_kept(hostile_server: ApiServer) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(20 * 2**20 // 65_536):
            sent += 65_536
            yield b"x" * 65_536

    tracemalloc.start()
    try:
        with httpx.Client(base_url=hostile_server.url, timeout=20) as client:
            try:
                response = client.post("/v1/jobs", content=endless(), headers=JSON)
                assert response.status_code == 413
            except httpx.TransportError:
                assert sent < 20 * 2**20
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 5 * 2**20


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("wait=NaN", "wait"),
        ("wait=-1", "wait"),
        ("wait=inf", "wait"),
        ("wait=soon", "wait"),
        ("wait=", "wait"),
    ],
)
def test_waits_that_are_wrong(http: httpx.Client, submitted: Job, query: str, param: str) -> None:
    response = http.get(f"/v1/jobs/{submitted.id}?{query}")
    assert response.status_code == 400
    assert refusal(response)["param"] == param


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=ten", "limit"),
        ("status=done", "status"),
        ("model=%00", "model"),
        ("tenant=a%20b", "tenant"),
        ("after=unknown", "after"),
        ("after=%00", "after"),
        ("after=%ff", "after"),
    ],
)
def test_listings_that_are_wrong(http: httpx.Client, query: str, param: str) -> None:
    response = http.get(f"/v1/jobs?{query}")
    assert response.status_code == 400, response.text
    assert refusal(response)["param"] == param


@pytest.mark.parametrize("job_id", ["nope", "%00", "%ff", "a" * 300, "%2e%2e", "'; DROP TABLE jobs; --"])
@pytest.mark.parametrize(("method", "tail"), [("GET", ""), ("POST", "/cancel"), ("POST", "/retry"), ("GET", "/events")])
def test_unknown_jobs(http: httpx.Client, job_id: str, method: str, tail: str) -> None:
    response = http.request(method, f"/v1/jobs/{job_id}{tail}")
    assert response.status_code == 404, response.text
    assert refusal(response)["code"] in ("job_not_found", "not_found")


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/jobs/", "/v2/jobs", "/v1/jobs/a/b/c", "/%00"])
def test_unknown_paths(http: httpx.Client, path: str) -> None:
    response = http.get(path, follow_redirects=True)
    assert response.status_code in (404, 200)
    if response.status_code == 404:
        refusal(response)


@pytest.mark.parametrize(("method", "path"), [("PUT", "/v1/jobs"), ("DELETE", "/v1/jobs/x"), ("POST", "/healthz")])
def test_wrong_methods(http: httpx.Client, method: str, path: str) -> None:
    response = http.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"]
    assert refusal(response)["code"] == "method_not_allowed"


@pytest.mark.parametrize("last_id", ["x", "1", "1-2-3", "-1-0", f"{2**64}-0", "1-" + "9" * 21, "$", "\u0661-\u0661"])
def test_last_event_ids_that_are_wrong(http: httpx.Client, submitted: Job, last_id: str) -> None:
    response = http.get(f"/v1/jobs/{submitted.id}/events", headers={"last-event-id": last_id.encode()})
    assert response.status_code == 400
    assert refusal(response)["param"] == "Last-Event-ID"


def test_a_body_that_never_ends_holds_nothing_up(hostile_server: ApiServer) -> None:
    with socket.create_connection(("127.0.0.1", hostile_server.port)) as half:
        half.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        began_s = time.monotonic()
        assert httpx.get(f"{hostile_server.url}/healthz").status_code == 200
        assert time.monotonic() - began_s < 1


def test_prompts_are_not_logged(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    secret = "Zanzibar-4711"
    assert http.post("/v1/jobs", json={**OK, "prompt": secret}).status_code == 202
    assert http.post("/v1/jobs", json={**OK, "prompt": secret, "temperature": -1}).status_code == 400
    assert http.post("/v1/jobs", json={**OK, "prompt": secret * 20}).status_code == 400
    own = [r for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))]
    assert not any(secret in record.getMessage() for record in own)


def test_a_name_of_megabytes_is_not_sent_back(http: httpx.Client) -> None:
    for body in ({"model": "bytes", "prompt": "x", "n" * 90_000: 1}, None):
        content = json.dumps(body) if body else '{"%s": 1, "%s": 2}' % (("n" * 40_000,) * 2)
        answer = http.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert len(answer.content) < 10_000


def test_a_null_key_beside_the_header_is_none_and_two_headers_are_refused(http: httpx.Client) -> None:
    body = {"model": "bytes", "prompt": "x", "idempotency_key": None}
    first, again = (http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "null-key"}) for _ in range(2))
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json()["id"] == again.json()["id"]
    twice = http.post("/v1/jobs", json=body, headers=[("Idempotency-Key", "a"), ("Idempotency-Key", "b")])
    assert refusal(twice)["param"] == "idempotency_key"


def test_a_slash_at_the_end_changes_nothing(http: httpx.Client) -> None:
    assert http.post("/v1/jobs/", json={"model": "bytes", "prompt": "x"}).status_code == 202
    assert http.get("/v1/jobs/").json() == http.get("/v1/jobs").json()
    assert http.get("/healthz/").status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/jobs?model=" + b"x" * 1_000_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /v1/jobs HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 1_000_000 + b"\r\n\r\n",
        b"GET /v1/jobs HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 200_000 + b"\r\n",
        b"GET /v1/jobs HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer " + b"x" * 1_000_000 + b"\r\n\r\n",
    ],
)
def test_a_head_that_is_too_large_is_refused(hostile_server: ApiServer, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hostile_server.port), timeout=20) as connection:
        try:
            connection.sendall(head)
            answer = connection.recv(64)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""  # it closed before all was sent
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert httpx.get(hostile_server.url + "/healthz").status_code == 200
