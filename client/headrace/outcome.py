"""How the outcome of a job stands in Celery's result backend. The worker writes it, `Producer.wait` reads it."""

from __future__ import annotations

from typing import Any

from headrace.contract import Job, JobStatus
from headrace.errors import HeadraceError, JobFailed

_CELERY_STATE = {
    JobStatus.SUCCEEDED: "SUCCESS",
    JobStatus.FAILED: "FAILURE",
    JobStatus.CANCELLED: "REVOKED",
    JobStatus.EXPIRED: "FAILURE",
}


def celery_outcome(job: Job) -> tuple[str, dict[str, Any] | JobFailed]:
    """State and result of an ended job for `backend.store_result`: the job as JSON, or an exception that carries it."""
    state = _CELERY_STATE[job.status]
    if job.status is JobStatus.SUCCEEDED:
        return state, job.model_dump(mode="json", exclude_none=True)
    return state, JobFailed(job)


def job_of_outcome(job_id: str, state: str, result: object) -> Job | None:
    """The ended job in a stored outcome, or None while there isn't one."""
    if state not in _CELERY_STATE.values():
        return None
    if isinstance(result, JobFailed):
        return result.job
    if state == "SUCCESS":
        return Job.model_validate(result)
    raise HeadraceError(f"job {job_id} ended as {state} without a record of it: {result!r}")
