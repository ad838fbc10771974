"""What the task returns: a line for people, a mapping for programs."""

from __future__ import annotations

from celery.utils.saferepr import saferepr
from headrace.contract import JobResult, Timings, Usage
from kombu.utils.json import dumps, loads

from worker.generation import Generation


def test_a_line_for_flower_and_a_mapping_for_async_result() -> None:
    result = JobResult(text="a b", finish_reason="stop", usage=Usage(prompt_tokens=3, completion_tokens=32))
    generation = Generation("j1", result, Timings(total_time_ms=1234.5))
    assert saferepr(generation) == "32 tokens · stop · 1.2 s"
    assert loads(dumps(generation)) == {
        "job_id": "j1",
        "status": "succeeded",
        "text": "a b",
        "finish_reason": "stop",
        "usage": result.usage.model_dump(mode="json"),
        "timings": generation.timings.model_dump(mode="json"),
    }


def test_a_vector_stands_in_the_mapping_and_its_length_in_the_line() -> None:
    result = JobResult(text="", finish_reason="length", embedding=[0.5, -1.0], usage=Usage(prompt_tokens=3))
    generation = Generation("j1", result, Timings(total_time_ms=34.5))
    assert saferepr(generation) == "vector of 2 · 0.0 s"
    assert loads(dumps(generation))["embedding"] == [0.5, -1.0]
