"""Whatever is put on the queue, the worker goes on, and says what was wrong where it can be seen."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import chain
from headrace.contract import JobStatus, Reason, new_job_id
from headrace.wire import TASK_GENERATE, queue_name

from tests.workers import MODEL, Sent, WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow


def fails_with(workplace: Workplace, result: Sent, text: str) -> None:
    """The task has failed in Celery with a message that holds `text`."""
    with pytest.raises(Exception, match=text):
        result.get(timeout=10)
    assert result.state == "FAILURE"


def test_bad_requests_fail_with_their_reason(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    """llm-d-async 353, llm-d-async 150."""
    start_worker()
    secret = "what nobody may read"
    cases: list[tuple[dict[str, Any], Reason, str]] = [
        ({"prompt": secret, "max_tokens": -1}, Reason.INVALID_REQUEST, "max_tokens: "),
        ({"prompt": secret, "surprise": 1}, Reason.INVALID_REQUEST, "surprise: "),
        ({"prompt": None}, Reason.INVALID_REQUEST, "exactly one of"),
        ({f"f{n}": secret for n in range(100_000)}, Reason.INVALID_REQUEST, "at most 100"),
        ({"model": "\ud800"}, Reason.INVALID_REQUEST, "model: "),
        ({"model": "m" * 200}, Reason.INVALID_REQUEST, "model: "),
        ({"model": ["a", "list"]}, Reason.INVALID_REQUEST, "model: "),
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
    send = workplace.send_task
    fails_with(workplace, send(args=["hello"], task_id=new_job_id(), queue=queue), "keyword arguments")
    fails_with(workplace, send(kwargs={"job_id": new_job_id()}, queue=queue), "no job has the id")
    fails_with(workplace, send(kwargs={"job_id": 7}, queue=queue), "not a valid job id")
    fails_with(workplace, send(kwargs=body, task_id="no good/id", queue=queue), "not a valid job id")
    assert workplace.send(max_tokens=3).get(timeout=10)["status"] == "succeeded"


def test_a_ledger_job_of_another_model_fails(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    start_worker()
    job = workplace.submit(model="other")
    sent = workplace.send_task(kwargs={"job_id": job.id}, task_id=job.id, queue=queue_name(MODEL))
    fails_with(workplace, sent, "model_not_found")
    assert workplace.ended(job.id).error is not None


Spoil = Callable[[dict[str, Any]], Any]


def embed(message: dict[str, Any], **options: Any) -> None:
    """Have the message ask for something to be done after its task."""
    body = json.loads(base64.b64decode(message["body"]))
    body[2].update(options)
    message["body"] = base64.b64encode(json.dumps(body).encode()).decode()


WITH_ITS_ID: dict[str, Spoil] = {
    "no json": lambda m: m.update(body=base64.b64encode(b"{not json").decode()),
    "no text": lambda m: m.update(body=base64.b64encode(b"\xff\xfe\x00").decode()),
    "a string": lambda m: m.update(body=base64.b64encode(b'"a string"').decode()),
    "too short": lambda m: m.update(body=base64.b64encode(b"[1]").decode()),
    "kwargs are a list": lambda m: m.update(body=base64.b64encode(b"[[], [1], {}]").decode()),
    "pickle": lambda m: m.update({"content-type": "application/x-python-serialize"}),
    "plain text": lambda m: m.update({"content-type": "text/plain"}),
    "unknown task": lambda m: m["headers"].update(task="no.such.task"),
    "odd task": lambda m: m["headers"].update(task=["a", "list"]),
    "odd eta": lambda m: m["headers"].update(eta="soon"),
    "odd expiry": lambda m: m["headers"].update(expires="late"),
    "an eta long ago": lambda m: (
        m.update(body=base64.b64encode(b"[[], {}, {}]").decode())
        or m["headers"].update(eta="0001-01-01T00:00:00+00:00")
    ),
    "arguments are null": lambda m: m.update(body=base64.b64encode(b"[null, {}, {}]").decode()),
    "options are a list": lambda m: m.update(body=base64.b64encode(b"[[], {}, []]").decode()),
    "a type that is no text": lambda m: m.update({"content-type": "\ud800"}),
    "Celery's own task": lambda m: m["headers"].update(task="celery.accumulate"),
    "limits are text": lambda m: m["headers"].update(timelimit=["soon", "late"]),
    "a shadow that is no text": lambda m: m["headers"].update(shadow=["a", "list"]),
    "a chain that is text": lambda m: embed(m, chain="next"),
    "a chain of numbers": lambda m: embed(m, chain=[17]),
    "a chain of nothing": lambda m: embed(m, chain=[{}]),
    "callbacks are a number": lambda m: embed(m, callbacks=5),
    "a callback that is none": lambda m: embed(m, callbacks=[{"task": 5}]),
    "a callback's callback that is none": lambda m: embed(
        m, callbacks=[{"task": "t", "args": [], "kwargs": {}, "options": {"link": [7]}}]
    ),
    "an errback that is none": lambda m: embed(m, errbacks=["x"]),
    "a chord that is none": lambda m: embed(m, chord=[3]),
    "no base64": lambda m: m.update(body="***"),
    "no properties": lambda m: m.pop("properties"),
    "properties are a list": lambda m: m.update(properties=[1]),
    "no tag": lambda m: m["properties"].pop("delivery_tag"),
    "null tag": lambda m: m["properties"].update(delivery_tag=None),
    "no delivery": lambda m: m["properties"].update(delivery_info=None),
    "delivery is text": lambda m: m["properties"].update(delivery_info="here"),
    "odd body encoding": lambda m: m["properties"].update(body_encoding=["a"]),
}
"""Messages that still say which job they were."""
BEYOND_HELP: dict[str, Spoil] = {
    "odd encoding": lambda m: m.update({"content-encoding": "klingon"}),
    "no type": lambda m: m.update({"content-type": None}),
    "no task": lambda m: m["headers"].pop("task"),
    "no id": lambda m: m["headers"].pop("id"),
    "odd id": lambda m: m["headers"].update(id=17),
    "odd limits": lambda m: m["headers"].update(timelimit="long"),
    "no headers": lambda m: m.update(headers={}),
    "null headers": lambda m: m.update(headers=None),
    "headers are text": lambda m: m.update(headers="none"),
}
"""Messages of which it is enough that nothing else suffers."""


def captured(workplace: Workplace) -> dict[str, Any]:
    """A good message as it stands on the broker, taken off a queue that nobody reads."""
    workplace.send(max_tokens=3, prompt="a secret of mine", options={"queue": "capture"})
    message: dict[str, Any] = json.loads(workplace.redis.rpop("capture"))
    return message


def test_broken_messages_are_settled_and_the_worker_goes_on(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker()
    queue = queue_name(MODEL)
    ids = {}
    for name, spoil in {**WITH_ITS_ID, **BEYOND_HELP}.items():
        message = captured(workplace)
        ids[name] = message["headers"]["id"]
        spoil(message)
        workplace.redis.lpush(queue, json.dumps(message))
    for noise in ("", "{", "17", "null", "[]", "{}"):
        workplace.redis.lpush(queue, noise)
    assert workplace.send(max_tokens=3).get(timeout=10)["status"] == "succeeded"
    for name in WITH_ITS_ID:
        job = workplace.ended(ids[name], within_s=5)
        assert job.status is JobStatus.FAILED, name
        assert job.error is not None
        assert job.error.code is Reason.INVALID_REQUEST, name
        with pytest.raises(Exception, match="invalid_request: "):
            Sent(workplace.app, ids[name]).get(timeout=5)
    eventually(lambda: workplace.unacked() == 0, 5, "every message is settled")
    assert "secret" not in worker.log
    assert "Traceback" not in worker.log
    assert worker.stop() == 0
    workplace.ledger.check()


def test_a_revoke_of_what_is_no_id_harms_nobody(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker()
    for odd in (123, None, True, 1.5, {"a": 1}, "\ud800", "\0", "x" * 10_000):
        workplace.app.control.broadcast("revoke", arguments={"task_id": [odd], "terminate": True})
    assert workplace.send(max_tokens=3).get(timeout=10)["status"] == "succeeded"
    assert "the writer's turn failed" not in worker.log


def test_messages_for_later_are_refused_and_keep_nobody_out(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker(MODEL__MAX_NUM_SEQS=2)
    later = [workplace.send(max_tokens=3, options={"countdown": 3600}) for _ in range(20)]
    assert workplace.send(max_tokens=3, options={"countdown": -1}).get(timeout=10)["status"] == "succeeded"
    for sent in later:
        fails_with(workplace, sent, "eta and countdown are not supported")
        assert workplace.job(sent.id).status is JobStatus.FAILED
    eventually(lambda: workplace.unacked() == 0, 5, "every message is acknowledged")


def test_a_chain_ends_with_its_first_member_that_fails(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    """Whoever waits for a chain waits for its last task, which never starts."""
    start_worker()

    def chained(**fields: Any) -> tuple[str, list[Sent]]:
        good = {"model": MODEL, "prompt": "hello", "max_tokens": 3}
        members = [
            workplace.app.signature(TASK_GENERATE, kwargs=kwargs, task_id=new_job_id(), queue=queue_name(MODEL))
            for kwargs in ({**good, **fields}, good, good)
        ]
        ids = [member.options["task_id"] for member in members]
        chain(*members, app=workplace.app).apply_async()
        return ids[0], [Sent(workplace.app, task_id) for task_id in ids[1:]]

    _, rest = chained(max_tokens=-1)
    for one in rest:
        fails_with(workplace, one, "invalid_request: max_tokens")
    first, rest = chained(max_tokens=3000)
    workplace.running(first)
    workplace.ledger.request_cancel([first])
    for one in rest:
        eventually(lambda one=one: one.state == "REVOKED", 10, "the rest of the chain is told")
