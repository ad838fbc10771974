"""The tasks that producers name."""

from __future__ import annotations

from typing import Any

from headrace.wire import TASK_EMBED, TASK_GENERATE

from worker.app import app
from worker.failures import JobFailed
from worker.generation import Generation


@app.task(name=TASK_GENERATE, acks_late=True, throws=(JobFailed,))  # type: ignore[untyped-decorator]  # Celery has no types
def generate(*args: Any, **kwargs: Any) -> Generation:
    """Generate text for a job of the ledger (`job_id=...`), or for a whole `JobRequest` given as keyword arguments."""
    from worker.run import run
    from worker.slot import current_slot

    return run(current_slot(), args, kwargs)


@app.task(name=TASK_EMBED, acks_late=True, throws=(JobFailed,))  # type: ignore[untyped-decorator]  # Celery has no types
def embed(*args: Any, **kwargs: Any) -> Generation:
    """Make a vector of the text of a `JobRequest` given as keyword arguments; a job of the ledger knows what it is."""
    from worker.run import run
    from worker.slot import current_slot

    return run(current_slot(), args, kwargs if set(kwargs) == {"job_id"} else {**kwargs, "embed": True})
