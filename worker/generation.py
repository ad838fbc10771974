"""What the task returns to Celery."""

from __future__ import annotations

from typing import Any

from headrace.contract import JobResult, JobStatus, Timings
from headrace.counting import counted


class Generation:
    """A finished job: a line for Flower's result column, and a mapping for callbacks (`link`, chains).

    `AsyncResult.get()` gets the whole job instead, see `headrace.outcome`.
    """

    def __init__(self, job_id: str, result: JobResult, timings: Timings) -> None:
        self.job_id = job_id
        self.result = result
        self.timings = timings

    def __repr__(self) -> str:
        seconds = (self.timings.total_time_ms or 0.0) / 1000
        if self.result.embedding is not None:
            return f"vector of {len(self.result.embedding)} · {seconds:.1f} s"
        tokens = counted(self.result.usage.completion_tokens, "token")
        return f"{tokens} · {self.result.finish_reason} · {seconds:.1f} s"

    def __json__(self) -> dict[str, Any]:
        return {
            "job_id": self.job_id,
            "status": JobStatus.SUCCEEDED.value,
            "text": self.result.text,
            "finish_reason": self.result.finish_reason,
            "usage": self.result.usage.model_dump(mode="json"),
            "timings": self.timings.model_dump(mode="json"),
            **({} if self.result.embedding is None else {"embedding": self.result.embedding}),
        }
