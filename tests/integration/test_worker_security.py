"""What a worker refuses from the broker: pickles on any way in, and messages that nobody with the key has signed."""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from headrace import Producer
from headrace.contract import JobStatus, Reason, new_job_id
from headrace.signing import SIGNATURE_HEADER, sign
from headrace.wire import celery_config, queue_name

from ledger.transport import CeleryTransport
from tests.workers import MODEL, WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow

KEY = "the key of this test's producers"


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_no_way_in_unpickles_anything(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """As a task, as a remote-control command, and as a task's result that a producer reads."""
    bomb = tmp_path / "unpickled"
    worker = start_worker()
    workplace.send(max_tokens=3, options={"queue": "capture"})
    message: dict[str, Any] = json.loads(workplace.redis.rpop("capture"))
    message.update({"content-type": "application/x-python-serialize", "content-encoding": "binary"})
    message["body"] = base64.b64encode(pickle.dumps([[], {"x": Bomb(bomb)}, {}])).decode()
    workplace.redis.lpush(queue_name(MODEL), json.dumps(message))
    assert workplace.ended(message["headers"]["id"]).error.code is Reason.INVALID_REQUEST

    app = Celery("attacker", set_as_current=False)
    app.conf.update(celery_config(workplace.broker_url), accept_content=["json", "pickle"])
    app.control.mailbox.serializer = "pickle"
    app.control.broadcast("revoke", arguments={"task_id": Bomb(bomb)})
    app.close()

    job = workplace.submit(max_tokens=3)
    workplace.ended(job.id)
    key = b"celery-task-meta-" + job.id.encode()
    eventually(lambda: workplace.redis.exists(key), 5, "the worker has stored its result")
    workplace.redis.set(key, pickle.dumps({"status": "SUCCESS", "result": Bomb(bomb)}))
    with Producer(workplace.broker_url) as producer, pytest.raises(Exception, match=r"."):
        producer.wait(job.id, timeout=0.5)

    assert workplace.send(max_tokens=3).get(timeout=10)["status"] == "succeeded"
    assert not bomb.exists()
    assert worker.process.poll() is None


def test_a_worker_with_a_key_runs_what_is_signed(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    """From the client's producer, from one without our client, and from the ledger through any relay."""
    start_worker(SIGNING_KEY="the next key of this test", SIGNING_KEY_PREVIOUS=KEY)
    with Producer(workplace.broker_url, signing_key=KEY) as producer:
        assert producer.run("hello", model=MODEL, max_tokens=3, logit_bias={70: 1.0, 8: 2.0}, timeout=20).result
    kwargs, task_id = {"model": MODEL, "prompt": "hello", "max_tokens": 3}, new_job_id()
    headers = {SIGNATURE_HEADER: sign(KEY, task_id, kwargs)}
    raw = workplace.send_task(kwargs=kwargs, task_id=task_id, queue=queue_name(MODEL), headers=headers)
    assert raw.get(timeout=20)["status"] == "succeeded"
    assert workplace.ended(workplace.submit(max_tokens=3).id).status is JobStatus.SUCCEEDED  # the worker's relay signs

    [job] = [workplace.submit(max_tokens=3, prompt="once more")]
    transport = CeleryTransport(workplace.broker_url, KEY)
    transport.publish(workplace.ledger.outbox(10) or workplace.ledger.queued(MODEL, -1, 10))
    transport.close()
    assert workplace.ended(job.id).status is JobStatus.SUCCEEDED


def test_a_worker_with_a_key_refuses_the_rest_with_the_reason(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(SIGNING_KEY=KEY)
    good = {"model": MODEL, "prompt": "what nobody may read", "max_tokens": 3}
    queue = queue_name(MODEL)

    def forged(header: Callable[[str], dict[str, str]], **fields: Any) -> str:
        task_id = new_job_id()
        return workplace.send_task(kwargs={**good, **fields}, task_id=task_id, queue=queue, headers=header(task_id)).id

    refused = {
        forged(lambda _: {}): "not signed",
        forged(lambda _: {SIGNATURE_HEADER: "t=1,v1=x"}): "no signature",
        forged(lambda i: {SIGNATURE_HEADER: sign("somebody else's key", i, good)}): "not that of this message",
        forged(lambda i: {SIGNATURE_HEADER: sign(KEY, i, good)}, max_tokens=4): "not that of this message",
        forged(lambda _: {SIGNATURE_HEADER: sign(KEY, new_job_id(), good)}): "not that of this message",
        forged(lambda i: {SIGNATURE_HEADER: sign(KEY, i, good, now_s=1e9)}): "days ago",
    }
    for job_id, why in refused.items():
        job = workplace.ended(job_id)
        assert (job.status, job.attempt) == (JobStatus.FAILED, 0)
        assert job.error is not None
        assert job.error.code is Reason.INVALID_REQUEST
        assert why in job.error.message
    eventually(lambda: workplace.unacked() == 0, 5, "all are acknowledged")
    assert KEY not in worker.log
    assert "nobody may read" not in worker.log
    workplace.ledger.check()


def test_a_replayed_message_runs_nothing_twice(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker(SIGNING_KEY=KEY)
    kwargs, task_id = {"model": MODEL, "prompt": "hello", "max_tokens": 3}, new_job_id()
    headers = {SIGNATURE_HEADER: sign(KEY, task_id, kwargs)}
    for _ in range(3):
        workplace.send_task(kwargs=kwargs, task_id=task_id, queue=queue_name(MODEL), headers=headers)
    first = workplace.ended(task_id)
    eventually(lambda: workplace.unacked() == 0 and workplace.queued_messages() == 0, 10, "all are settled")
    assert workplace.job(task_id) == first
    assert first.attempt == 1
