"""Trace contexts: what is one, which one is current, and how they go along with a job."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from headrace import flows
from headrace.contract import JobRequest, Priority, job_kwargs
from headrace.errors import BadRequest
from headrace.params import new_request
from headrace.publication import JobMessage
from headrace.signing import SIGNATURE_HEADER, check
from headrace.tracing import EXAMPLE, current, joined, named, parsed
from headrace.wire import TASK_GENERATE
from opentelemetry import trace

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASKED = trace.NonRecordingSpan(trace.SpanContext(int(TRACE, 16), int(SPAN, 16), False, trace.TraceFlags(1)))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (EXAMPLE, EXAMPLE),
        (f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-00"),
        (f"00-{TRACE}-{SPAN}-03", f"00-{TRACE}-{SPAN}-03"),
        (f" {EXAMPLE}\t", EXAMPLE),
        (f"cc-{TRACE}-{SPAN}-03", EXAMPLE),
        (f"01-{TRACE}-{SPAN}-00-what-comes-later", f"00-{TRACE}-{SPAN}-00"),
    ],
)
def test_one_is_read_as_the_first_version_writes_it(value: str, found: str) -> None:
    assert parsed(value) == found


@pytest.mark.parametrize(
    "value",
    [
        None, 7, b"00", [EXAMPLE], "", "00", EXAMPLE[:-1], EXAMPLE + "0", f"{EXAMPLE}-more", f"{EXAMPLE}\n",
        f"ff-{TRACE}-{SPAN}-01", f"01-{TRACE}-{SPAN}-01more", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01",
        EXAMPLE.upper(), f"0x-{TRACE}-{SPAN}-01", f"00_{TRACE}_{SPAN}_01", "00-" + "\u0663" * 32 + f"-{SPAN}-01",
    ],
)  # fmt: skip
def test_what_is_none_is_ignored(value: object) -> None:
    assert parsed(value) is None


def test_a_field_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match=f"such as {EXAMPLE}") as caught:
        new_request("m", "x", None, {"traceparent": "00-abc"})
    assert caught.value.param == "traceparent"


def test_the_same_work_in_another_trace_is_the_same_work() -> None:
    request = JobRequest(model="m", prompt="x")
    asked = JobRequest(model="m", prompt="x", traceparent=EXAMPLE)
    assert asked.fingerprint() == request.fingerprint()
    assert "traceparent" not in asked.body(), "a worker of the version before reads it"
    assert job_kwargs(asked)["traceparent"] == EXAMPLE


def test_logs_name_a_job_with_its_trace() -> None:
    assert named("j1", None) == "j1"
    assert named("j1", EXAMPLE) == f"j1 (trace {TRACE})"


def test_the_current_span_is_told() -> None:
    assert current() is None
    with trace.use_span(ASKED):
        assert current() == EXAMPLE
    assert current() is None


@pytest.mark.parametrize("loaded", [None, ModuleType("opentelemetry.trace")])
def test_without_opentelemetry_there_is_none(monkeypatch: pytest.MonkeyPatch, loaded: ModuleType | None) -> None:
    """Not installed, or just being imported by another thread."""
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", loaded)
    assert current() is None
    with joined(EXAMPLE):
        assert current() is None


def test_spans_that_are_made_meanwhile_join_a_jobs_trace() -> None:
    with trace.use_span(ASKED):
        with joined(f"00-{'1' * 32}-{'2' * 16}-00"):
            joining = trace.get_current_span().get_span_context()
            assert (joining.trace_id, joining.span_id) == (int("1" * 32, 16), int("2" * 16, 16))
            assert joining.is_remote
        with joined(None):
            assert current() == EXAMPLE


def test_the_client_tells_the_current_span_in_a_header() -> None:
    def headers(request: JobRequest) -> dict[str, str]:
        sent = next(flows.submit(request, 0))
        assert isinstance(sent, flows.Send)
        assert "traceparent" not in sent.json or sent.json["traceparent"] == request.traceparent
        return dict(sent.headers)

    plain = JobRequest(model="m", prompt="x", idempotency_key="k")
    assert headers(plain) == {}
    with trace.use_span(ASKED):
        assert headers(plain) == {"traceparent": EXAMPLE}
        assert headers(JobRequest(model="m", prompt="x", idempotency_key="k", traceparent=EXAMPLE)) == {}


def test_a_message_has_it_as_a_header_beside_its_signature() -> None:
    message = JobMessage("j1", "m", Priority.NORMAL, {"job_id": "j1"}, EXAMPLE)
    assert message.options(None)["headers"] == {"traceparent": EXAMPLE}
    headers = message.options("the key of the producers")["headers"]
    assert headers["traceparent"] == EXAMPLE
    check(["the key of the producers"], headers[SIGNATURE_HEADER], TASK_GENERATE, "j1", {"job_id": "j1"}, 0)
    assert "headers" not in JobMessage("j1", "m", Priority.NORMAL, {}).options(None)
