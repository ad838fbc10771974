"""Celery's `revoke` and `terminate`, made durable: a worker forgets what it was told, the ledger doesn't."""

from __future__ import annotations

from typing import Any

from celery.utils.functional import maybe_list
from celery.worker import control
from celery.worker.control import Panel, ok

from worker.intake import is_job_id

_celery_revoke = control.revoke


@Panel.register(name="revoke", type="control", variadic="task_id", signature="[id1 [id2 [... [idN]]]]")  # type: ignore[untyped-decorator]
def revoke(
    state: Any,
    task_id: Any,
    terminate: bool = False,
    signal: Any = None,
    fences: dict[str, int] | None = None,
    **kwargs: Any,
) -> Any:
    """Revoke task by task id (or list of ids); the ledger remembers it for jobs that are not here.

    `fences` come with a cancellation that the ledger knows of: each means one attempt, and nothing is to be remembered.
    """
    if fences is not None:
        for job_id, fence in fences.items():
            state.consumer.pool.cancel_attempt(job_id, fence)
        return ok(f"cancelled: {', '.join(fences)}")
    job_ids = [each for each in maybe_list(task_id) or [] if is_job_id(each)]
    answer = _celery_revoke(state, job_ids, terminate=terminate, signal=signal, **kwargs)
    pool = state.consumer.pool
    elsewhere = []
    for job_id in job_ids:
        slot = pool.find(job_id)
        if slot is None:
            elsewhere.append(job_id)
        elif terminate or not slot.accepted:
            pool.cancel(job_id)
    if elsewhere:
        pool.services.writer.cancel(elsewhere, running=terminate)
    return answer


@Panel.register(
    name="terminate",
    type="control",
    args=[("signal", str)],
    variadic="task_id",
    signature="<signal> [id1 [id2 [... [idN]]]]",
)  # type: ignore[untyped-decorator]
def terminate(state: Any, signal: Any, task_id: Any, **kwargs: Any) -> Any:
    """Terminate task by task id (or list of ids)."""
    return revoke(state, task_id, terminate=True, signal=signal)
