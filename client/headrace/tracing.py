"""W3C Trace Context (https://www.w3.org/TR/trace-context/): which trace a job belongs to, and which span asked for it.

No spans are made here, and nothing needs OpenTelemetry: where a process has loaded it, its current span is asked.
"""

from __future__ import annotations

import re
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

TRACEPARENT = "traceparent"
"""The header's name, over HTTP and in Celery's messages: where OpenTelemetry's instrumentation looks for it."""
TRACEPARENT_CHARS = 55
EXAMPLE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
"""The one flag that later versions of the standard have to keep."""


def parsed(value: object) -> str | None:
    """A traceparent in the standard's first version, which all read; None for what is none, as the standard has it."""
    match = _FORM.fullmatch(value.strip(" \t")) if isinstance(value, str) else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    if version != "00":
        flags = f"{int(flags, 16) & _SAMPLED:02x}"
    return f"00-{trace_id}-{span_id}-{flags}"


def checked(value: str) -> str:
    """The same for somebody who has to be told: raises ValueError."""
    found = parsed(value)
    if found is None:
        raise ValueError(f"not a traceparent of W3C Trace Context, such as {EXAMPLE}")
    return found


def trace_id(traceparent: str) -> str:
    return traceparent.split("-")[1]


def named(job_id: str, traceparent: str | None) -> str:
    """The job as logs name it."""
    return job_id if traceparent is None else f"{job_id} (trace {trace_id(traceparent)})"


def current() -> str | None:
    """The traceparent of the current span, if this process uses OpenTelemetry and there is one."""
    api = _opentelemetry()
    if api is None:
        return None
    span = api.get_current_span().get_span_context()
    if not span.is_valid:
        return None
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def joined(traceparent: str | None) -> AbstractContextManager[object]:
    """Have OpenTelemetry, if this process uses it, make spans as children of that one."""
    api = _opentelemetry()
    if api is None or traceparent is None:
        return nullcontext()
    _, trace, span, flags = (int(part, 16) for part in traceparent.split("-"))
    asked = api.SpanContext(trace, span, is_remote=True, trace_flags=api.TraceFlags(flags))
    joining: AbstractContextManager[object] = api.use_span(api.NonRecordingSpan(asked))
    return joining


def _opentelemetry() -> Any:
    """Its API, if it has been imported, and to the end."""
    api = sys.modules.get("opentelemetry.trace")
    return api if hasattr(api, "use_span") else None
