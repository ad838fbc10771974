"""Whatever is put on the queue, the worker goes on, and says what was wrong where it can be seen."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from celery.result import AsyncResult
from headrace.contract import JobStatus, Reason, new_job_id
from headrace.wire import TASK_GENERATE, queue_name

from tests.workers import MODEL, WorkerProcess, Workplace, eventually


def fails_with(workplace: Workplace, result: AsyncResult, text: str) -> None:
    """The task has failed in Celery with a message that holds `text`."""
    with pytest.raises(Exception, match=text):
        result.get(timeout=10)
    assert result.state == "FAILURE"


def test_bad_requests_fail_with_their_reason(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    start_worker()
    secret = "what nobody may read"  # noqa: S105
    cases: list[tuple[dict[str, Any], Reason, str]] = [
        ({"prompt": secret, "max_tokens": -1}, Reason.INVALID_REQUEST, "max_tokens: "),
        ({"prompt": secret, "surprise": 1}, Reason.INVALID_REQUEST, "surprise: "),
        ({"prompt": None}, Reason.INVALID_REQUEST, "exactly one of"),
        ({"prompt": secret, "model": "other"}, Reason.MODEL_NOT_FOUND, "model 'other' is not on this queue"),
        ({"prompt": "x" * 5000}, Reason.CONTEXT_LENGTH_EXCEEDED, ""),
    ]
    for fields, reason, text in cases:
        sent = workplace.send(**fields)
        fails_with(workplace, sent, f"{reason.value}: .*{text}")
        job = workplace.job(sent.id)
        assert job.status is JobStatus.FAILED
        assert job.error is not None
        assert job.error.code is reason
        assert text in job.error.message
        assert secret not in job.error.message
    assert workplace.send(max_tokens=3).get(timeout=10)["status"] == "succeeded"
    eventually(lambda: workplace.unacked() == 0, 5, "all are acknowledged")
    workplace.ledger.check()


def test_odd_arguments_and_ids_fail_with_their_reason(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker()
    queue = queue_name(MODEL)
    body = {"model": MODEL, "prompt": "hello"}
    send = workplace.app.send_task
    fails_with(workplace, send(TASK_GENERATE, args=["hello"], task_id=new_job_id(), queue=queue), "keyword arguments")
    fails_with(workplace, send(TASK_GENERATE, kwargs={"job_id": new_job_id()}, queue=queue), "no job has the id")
    fails_with(workplace, send(TASK_GENERATE, kwargs={"job_id": 7}, queue=queue), "not a valid job id")
    fails_with(workplace, send(TASK_GENERATE, kwargs=body, task_id="no good/id", queue=queue), "not a valid job id")
    assert workplace.send(max_tokens=3).get(timeout=10)["status"] == "succeeded"


def test_a_ledger_job_of_another_model_fails(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    start_worker()
    job = workplace.submit(model="other")
    sent = workplace.app.send_task(
        TASK_GENERATE, kwargs={"job_id": job.id}, task_id=job.id, queue=queue_name(MODEL)
    )
    fails_with(workplace, sent, "model_not_found")
    assert workplace.ended(job.id).error is not None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: m.update({"body": base64.b64encode(b"{not json").decode()}),
        lambda m: m.update({"body": base64.b64encode(b"\xff\xfe\x00").decode()}),
        lambda m: m.update({"body": base64.b64encode(b'"a string"').decode()}),
        lambda m: m.update({"body": base64.b64encode(b"[1]").decode()}),
        lambda m: m.update({"body": "***"}),
        lambda m: m.update({"content-type": "application/x-python-serialize"}),
        lambda m: m.update({"content-type": "text/plain"}),
        lambda m: m.update({"content-type": None}),
        lambda m: m.update({"content-encoding": "klingon"}),
        lambda m: m["headers"].update({"task": "no.such.task"}),
        lambda m: m["headers"].update({"task": ["a", "list"]}),
        lambda m: m["headers"].pop("task"),
        lambda m: m["headers"].pop("id"),
        lambda m: m["headers"].update({"id": 17}),
        lambda m: m["headers"].update({"eta": "soon"}),
        lambda m: m["headers"].update({"expires": "late"}),
        lambda m: m["headers"].update({"timelimit": "long"}),
        lambda m: m.update({"headers": {}}),
        lambda m: m.update({"headers": None}),
    ],
    ids=[
        "no json", "no text", "a string", "too short", "no base64", "pickle", "plain text", "no type", "odd encoding",
        "unknown task", "odd task", "no task", "no id", "odd id", "odd eta", "odd expiry", "odd limits", "no headers",
        "null headers",
    ],
)  # fmt: skip
def test_a_broken_message_does_not_stop_the_worker(
    spoil: Callable[[dict[str, Any]], Any], workplace: Workplace, module_worker: WorkerProcess
) -> None:
    sent = workplace.send(max_tokens=3, prompt="a secret of mine")
    queue = queue_name(MODEL)
    assert sent.get(timeout=10)["status"] == "succeeded"
    module_worker.signal(19)
    try:
        victim = workplace.send(max_tokens=3, prompt="a secret of mine")
        [raw] = workplace.redis.lrange(queue, 0, -1) or [None]
        if raw is not None:
            message = json.loads(raw)
            spoil(message)
            workplace.redis.lset(queue, 0, json.dumps(message))
    finally:
        module_worker.signal(18)
    assert raw is not None
    assert workplace.send(max_tokens=3).get(timeout=10)["status"] == "succeeded"
    eventually(lambda: workplace.unacked() == 0, 5, "the broken message is settled")
    assert victim.id is not None
    assert "secret" not in module_worker.log
