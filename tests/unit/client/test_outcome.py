"""An outcome survives Celery's result backend."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime

import celery
import pytest
from headrace.contract import Job, JobError, JobResult, JobStatus, Priority, Reason
from headrace.errors import ApiError, BadRequest, HeadraceError, JobFailed
from headrace.outcome import celery_outcome, job_of_outcome


def ended(status: JobStatus) -> Job:
    good = status is JobStatus.SUCCEEDED
    return Job(
        id="j1",
        model="m",
        status=status,
        priority=Priority.LOW,
        tenant="t",
        created_at=datetime(2031, 1, 1, tzinfo=UTC),
        result=JobResult(text="so far"),
        error=None if good else JobError(code=Reason.CANCELLED, message="as asked"),
    )


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
@pytest.mark.parametrize("status", [s for s in JobStatus if s.terminal])
def test_every_end_comes_back_whole_through_the_result_backend(broker_url: str, status: JobStatus) -> None:
    app = celery.Celery(broker=broker_url, backend=broker_url, set_as_current=False)
    state, result = celery_outcome(ended(status))
    app.backend.store_result("j1", result, state)
    meta = app.backend.get_task_meta("j1")
    app.backend.client.close()
    assert job_of_outcome("j1", meta["status"], meta["result"]) == ended(status)


def test_there_is_no_outcome_while_the_job_runs() -> None:
    assert job_of_outcome("j1", "PENDING", None) is None
    assert job_of_outcome("j1", "STARTED", {"pid": 1}) is None


def test_an_end_that_someone_else_wrote_is_an_error_and_not_a_wait_for_ever() -> None:
    with pytest.raises(HeadraceError, match="REVOKED"):
        job_of_outcome("j1", "REVOKED", ValueError("terminated"))


def test_job_failed_says_why_and_is_json_inside() -> None:
    error = JobFailed(ended(JobStatus.CANCELLED))
    assert str(error) == "job j1 cancelled: cancelled: as asked"
    json.dumps(error.args)
    assert pickle.loads(pickle.dumps(error)).job == error.job


def test_api_errors_can_be_pickled() -> None:
    error = BadRequest("no", type="invalid_request_error", param="p", code="c", status=413)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, ApiError)
    assert vars(again) == vars(error)
