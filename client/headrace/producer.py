"""Submits jobs straight into Celery, for services that have the broker but not the HTTP door."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, Unpack

from pydantic import TypeAdapter, ValidationError

from headrace.contract import Job, JobId, JobRequest, JobStatus, job_kwargs, new_job_id, utc_now
from headrace.counting import counted
from headrace.errors import ConnectionFailed, JobFailed, JobTimeout, TooManyRequests
from headrace.outcome import job_of_outcome
from headrace.params import JobParams, Messages, Prompt, new_request
from headrace.publication import JobMessage, publish
from headrace.tracing import current
from headrace.validation import invalid
from headrace.waits import Backoff, Deadline, patience
from headrace.wire import WORKER_KEY_PREFIX, celery_config, queue_keys

CONNECT_TIMEOUT_S = 5.0
POLL_S = 5.0
OUTAGE_S = 30.0
"""`wait` gives up on a broker that has been away for this long."""
PUBLISH_RETRIES = {"max_retries": 3, "interval_start": 0.1, "interval_step": 0.2, "interval_max": 0.5}
BATCH_JOBS = 250
"""Messages of `submit_many` in one round trip."""
DEPTH_S = 1.0
"""How long a look at the depth of a queue is good for."""
_job_id: TypeAdapter[str] = TypeAdapter(JobId)


@dataclass(slots=True)
class _Depth:
    waiting: int
    until_s: float
    """On the monotonic clock."""


class Producer:
    """Puts jobs on the queue of their model. Needs the extra `headrace[celery]`.

    Requests are validated here, before they leave. Safe to share between threads. Nobody can refuse a message that is
    on the broker, so the producer itself holds back while `max_queued` messages wait for a job's model. `signing_key`
    is for workers that refuse unsigned messages; by default HEADRACE_SIGNING_KEY.
    """

    def __init__(self, broker_url: str, *, max_queued: int = 100_000, signing_key: str | None = None) -> None:
        try:
            import celery
            import redis
        except ImportError as error:
            raise ImportError(
                "headrace.Producer needs Celery and Redis: pip install './client[celery]' in Headrace's repository"
            ) from error
        self._max_queued = max_queued
        self._depths: dict[str, _Depth] = {}
        self._signing_key = os.environ.get("HEADRACE_SIGNING_KEY") if signing_key is None else signing_key
        config = celery_config(broker_url)
        config["broker_transport_options"] |= {"socket_connect_timeout": CONNECT_TIMEOUT_S, "socket_timeout": OUTAGE_S}
        self._app = celery.Celery("headrace", set_as_current=False)
        self._app.conf.update(config, result_backend=None, task_publish_retry_policy=PUBLISH_RETRIES)
        self._results = celery.Celery("headrace-results", set_as_current=False)
        self._results.conf.update(config)
        self._redis = redis.Redis.from_url(
            config["broker_url"], socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=CONNECT_TIMEOUT_S
        )

    def submit(
        self,
        prompt: Prompt | None = None,
        *,
        model: str,
        messages: Messages | None = None,
        job_id: str | None = None,
        **params: Unpack[JobParams],
    ) -> str:
        """Enqueue a job and return its id.

        Sending the same `job_id` again is harmless: one job comes of it. With an `idempotency_key`
        the id follows from the tenant and the key. While the queue is full it waits for as long as the job's deadline
        allows; TooManyRequests if it has none, or if that is too long.
        """
        request = _with_fixed_deadline(new_request(model, prompt, messages, params))
        job_id = _id_for(request) if job_id is None else _checked_id(job_id)
        with _broker_errors("publish the job"):
            self._await_room(request)
            _message(job_id, request).send(self._app, self._signing_key)
        return job_id

    def submit_many(self, requests: Iterable[JobRequest]) -> list[str]:
        """Enqueue jobs, some hundreds in each round trip, and return their ids in the same order.

        If that fails in between, the jobs before are enqueued and the others are not; of those on their way then it
        isn't known. With an `idempotency_key` in each request all of it may simply be repeated.
        """
        job_ids: list[str] = []
        with _broker_errors("publish the jobs"), self._app.producer_pool.acquire(block=True) as producer:
            for some in _portions(requests):
                messages = []
                for asked in some:
                    request = _with_fixed_deadline(asked)
                    messages.append(_message(_id_for(request), request))
                    self._await_room(request)
                publish(self._app, producer, messages, self._signing_key)
                job_ids += [message.job_id for message in messages]
        return job_ids

    def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """The job when it has ended, however it ended; JobTimeout after `timeout` seconds.

        Outcomes are kept for an hour (`result_expires`); a job that ended before that never comes.
        """
        deadline, backoff, lost_s = Deadline(timeout), Backoff(), 0.0
        while True:
            try:
                with _broker_errors("wait for the job"):
                    job = self._await_outcome(job_id, deadline)
            except ConnectionFailed:
                lost_s = lost_s or time.monotonic()
                if deadline.left_s() == 0 or time.monotonic() - lost_s > OUTAGE_S:
                    raise
                time.sleep(min(backoff.delay_s(), deadline.left_s()))
                continue
            if job is not None:
                return job
            if deadline.left_s() == 0:
                raise deadline.error(job_id, None)
            backoff.reset()
            lost_s = 0.0

    def run(
        self,
        prompt: Prompt | None = None,
        *,
        model: str,
        messages: Messages | None = None,
        timeout: float | None = None,
        **params: Unpack[JobParams],
    ) -> Job:
        """Submit and wait; raises JobFailed unless the job succeeded."""
        job_id = self.submit(prompt, model=model, messages=messages, **params)
        try:
            job = self.wait(job_id, timeout)
        except JobTimeout as late:
            raise JobTimeout(job_id, late.timeout_s, hint=self._obstacle(model)) from None
        if job.status is not JobStatus.SUCCEEDED:
            raise JobFailed(job)
        return job

    def cancel(self, job_id: str) -> None:
        """Ask the workers that are up now to drop the job, running or not."""
        with _broker_errors("cancel the job"):
            self._app.control.revoke(job_id, terminate=True)

    def close(self) -> None:
        self._app.close()
        self._results.close()
        self._redis.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _await_room(self, request: JobRequest) -> None:
        deadline = patience(request, None)
        while (waiting := self._waiting(request.model)) >= self._max_queued:
            if deadline is None or deadline.left_s() <= DEPTH_S:
                raise TooManyRequests(
                    f"the queue of {request.model!r} is full: {counted(waiting, 'message waits', 'messages wait')}, "
                    f"of at most {self._max_queued}",
                    type="rate_limit_error",
                    code="queue_full",
                    status=429,
                    retry_after_s=DEPTH_S,
                )
            time.sleep(DEPTH_S)

    def _waiting(self, model: str) -> int:
        """Messages that wait for the model: as the broker said within the last second, and what was sent since."""
        depth = self._depths.get(model)
        if depth is None or time.monotonic() >= depth.until_s:
            with self._redis.pipeline(transaction=False) as pipe:
                for key in queue_keys(model):
                    pipe.llen(key)
                depth = self._depths[model] = _Depth(sum(pipe.execute()), time.monotonic() + DEPTH_S)
        depth.waiting += 1
        return depth.waiting - 1

    def _obstacle(self, model: str) -> str | None:
        """Why no job of the model's can end now, as far as the broker tells."""
        try:
            with _broker_errors("look for workers"):
                keys = list(self._redis.scan_iter(f"{WORKER_KEY_PREFIX}*", count=1000))
                seen = self._redis.mget(keys) if keys else []
        except ConnectionFailed:
            return None
        if any(json.loads(value).get("model") == model for value in seen if value):
            return None
        return f"no worker takes jobs for the model {model!r}: `headrace doctor` tells more"

    def _await_outcome(self, job_id: str, deadline: Deadline) -> Job | None:
        """The outcome if it is there; else listen for its publication, for `POLL_S` at most; None if it hasn't come."""
        key: str = self._results.backend.get_key_for_task(job_id).decode()
        if (job := self._outcome_at(key, job_id)) is not None:
            return job
        with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:  # type: ignore[no-untyped-call]
            pubsub.subscribe(key)
            until_s = time.monotonic() + min(deadline.left_s(), POLL_S)
            while True:
                job = self._outcome_at(key, job_id)
                left_s = until_s - time.monotonic()
                if job is not None or left_s <= 0:
                    return job
                pubsub.get_message(timeout=left_s)

    def _outcome_at(self, key: str, job_id: str) -> Job | None:
        stored = self._redis.get(key)
        if not stored:
            return None
        meta: dict[str, Any] = self._results.backend.decode_result(stored)
        return job_of_outcome(job_id, meta["status"], meta["result"])


def _portions(requests: Iterable[JobRequest]) -> Iterator[list[JobRequest]]:
    left = iter(requests)
    while some := list(islice(left, BATCH_JOBS)):
        yield some


def _message(job_id: str, request: JobRequest) -> JobMessage:
    traceparent = request.traceparent or current()
    return JobMessage(job_id, request.model, request.priority, job_kwargs(request), traceparent)


def _checked_id(job_id: str) -> str:
    try:
        return _job_id.validate_python(job_id)
    except ValidationError:
        raise invalid(f"job_id: {job_id!r} is not an id", "job_id") from None


def _id_for(request: JobRequest) -> str:
    if request.idempotency_key is None:
        return new_job_id()
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"headrace:{request.tenant}\n{request.idempotency_key}"))


def _with_fixed_deadline(request: JobRequest) -> JobRequest:
    """`ttl_s` counts from now, not from the moment at which a worker reads the message."""
    if request.ttl_s is None:
        return request
    fields = {**job_kwargs(request), "deadline": request.deadline_from(utc_now())}
    del fields["ttl_s"]
    return JobRequest.model_validate(fields)


@contextmanager
def _broker_errors(doing: str) -> Iterator[None]:
    """Everything that says "the broker is away" as ConnectionFailed."""
    import kombu.exceptions
    import redis

    try:
        yield
    except (kombu.exceptions.OperationalError, redis.RedisError, OSError) as error:
        raise ConnectionFailed(f"can't {doing}, the broker does not answer: {error}") from error
