"""A whole Headrace for a while: broker, ledger, API and worker, embedded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from headrace import Job, JobStatus

from bench.side import SideFailed
from bench.workload import Workload
from cli.bringup import Plan, Screen, Stack
from cli.instance import sole
from cli.signals import Interrupt
from settings import settings_with


@contextmanager
def instance(**model: Any) -> Iterator[Stack]:
    """One on free ports and an empty ledger; `model` sets the model's settings."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        home = Path(directory)
        settings = settings_with(home=home, api={"port": 0}, worker={"metrics_port": 0}, model=model)
        stack = Stack.plan(Plan(settings, broker_port=0, flower=False), Screen(quiet=True), Interrupt())
        with sole(home):
            try:
                stack.start()
                yield stack
            finally:
                stack.stop()


def check_jobs(jobs: Sequence[Job], work: Workload) -> None:
    """Raise `SideFailed` unless every job succeeded with as many tokens as were asked for."""
    for job in jobs:
        if job.status is not JobStatus.SUCCEEDED or job.result is None:
            raise SideFailed(f"job {job.id} {job.status}: {job.error.message if job.error else ''}")
        if job.result.usage.completion_tokens != work.max_tokens:
            raise SideFailed(f"job {job.id} gave {job.result.usage.completion_tokens} tokens, not {work.max_tokens}")


def batch_size(jobs: Sequence[Job]) -> float:
    """How many requests were in a step that held one of the jobs, on average."""
    sizes = [job.timings.mean_batch_size for job in jobs if job.timings and job.timings.mean_batch_size]
    return fmean(sizes) if sizes else 0.0


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("headrace", "celery", "torch")}
