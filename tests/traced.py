"""OpenTelemetry in a worker: `-I tests.traced` makes spans of what Celery does.

Those that have ended are lines of JSON in the file that `TRACED_SPANS` names.
"""

from __future__ import annotations

import os

from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

VARIABLE = "TRACED_SPANS"


def install(path: str) -> None:
    spans = TracerProvider()
    lines = open(path, "a", buffering=1)  # noqa: SIM115
    exporter = ConsoleSpanExporter(out=lines, formatter=lambda span: span.to_json(indent=None) + "\n")
    spans.add_span_processor(SimpleSpanProcessor(exporter))
    CeleryInstrumentor().instrument(tracer_provider=spans)


if VARIABLE in os.environ:
    install(os.environ[VARIABLE])
