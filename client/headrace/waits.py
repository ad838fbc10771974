"""How long to wait: between two attempts, and in all."""

from __future__ import annotations

import random
import time

from headrace.contract import Job, JobRequest, utc_now
from headrace.errors import JobTimeout


class Backoff:
    """Delays that double from `first_s` to `most_s`, each drawn from the upper half of its range."""

    def __init__(self, first_s: float = 0.1, most_s: float = 5.0) -> None:
        self._first_s = self._next_s = first_s
        self._most_s = most_s

    def delay_s(self) -> float:
        now_s, self._next_s = self._next_s, min(self._next_s * 2, self._most_s)
        return now_s * random.uniform(0.5, 1.0)  # noqa: S311 - jitter

    def reset(self) -> None:
        self._next_s = self._first_s


class Deadline:
    """A moment on the monotonic clock, or never."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._at_s = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float:
        return float("inf") if self._at_s is None else max(0.0, self._at_s - time.monotonic())

    def error(self, job_id: str, job: Job | None) -> JobTimeout:
        return JobTimeout(job_id, self.timeout_s or 0.0, job)


def patience(request: JobRequest, timeout_s: float | None) -> Deadline | None:
    """The first of the moments after which the job isn't wanted; None if there is none."""
    limits = [] if timeout_s is None else [timeout_s]
    if (wanted := request.deadline_from(now := utc_now())) is not None:
        limits.append((wanted - now).total_seconds())
    return Deadline(min(limits)) if limits else None
