"""The consumer, made to survive what it may be sent and to keep its jobs going while the broker is away."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from celery import states
from celery.utils.log import get_logger
from celery.utils.time import maybe_iso8601, maybe_make_aware
from celery.worker import loops
from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown
from headrace import signing
from headrace.contract import JobStatus, Reason, utc_now
from headrace.tracing import TRACEPARENT, named, parsed

from settings import get_settings
from worker.broker_probe import BrokerProbe
from worker.canvas import canvas_fault
from worker.celery_result import put_result
from worker.envelope import BrokenEnvelope
from worker.failures import JobFailed
from worker.intake import MAX_BODY_BYTES, RAW_LIMIT_CHARS, rejected_id
from worker.lease import JobChannel
from worker.orders import Rejection

log = get_logger(__name__)

RECONNECT_MAX_S = 3.0
PUMP_S = 0.05
"""How often the hub's timers are looked at while the broker is away."""
EVENTS_S = 0.05
"""Celery's events of so long go together: to publish them costs as much as a job, however many they are."""


class JobConsumer(Consumer):  # type: ignore[misc]  # Celery has no types
    """Bad messages become failed jobs with a reason. Their bodies are kept in the ledger and out of the log."""

    _flush_at_s = 0.0
    """When the events that wait are sent, on the monotonic clock."""

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        handle = super().create_task_handler(*args, **kwargs)
        keys = get_settings().accepted_secrets

        def on_task_received(message: Any) -> None:
            try:
                why = fault(message) or unsigned(message, keys)
                if why is None:
                    message.headers.pop("eta", None)
                    handle(message)
                else:
                    self.refuse(message, why)
            except Exception as exc:
                # kombu counts KeyError among the errors of a Redis connection; here it is one of the message.
                if isinstance(exc, self.connection_errors) and not isinstance(exc, KeyError):
                    raise
                self.refuse(message, f"the message can't be read: {type(exc).__name__}")

        return on_task_received

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        if isinstance(exc, BrokenEnvelope):
            self.refuse(message, str(exc))
            return
        self.refuse(message, f"the body can't be decoded as {message.content_type}: {type(exc).__name__}")

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        self.refuse(message, f"the message is no task: {str(exc)[:200]}")

    def on_unknown_message(self, body: Any, message: Any) -> None:
        self.refuse(message, "the message names no task")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        self.refuse(message, f"no task is called {exc.args[0]!r}")

    def refuse(self, message: Any, why: str) -> None:
        """Record the message as a failed job, fail its task, and only then acknowledge it."""
        services = self.pool.services
        why = why.encode(errors="replace").decode()
        headers = message.headers if isinstance(message.headers, dict) else {}
        task_id = headers.get("id") or message.properties.get("correlation_id")
        traceparent = parsed(headers.get(TRACEPARENT))
        log.error("refused a message (task id %s): %s", named(repr(task_id), traceparent), why)
        rejection = Rejection(
            rejected_id(task_id),
            services.model,
            Reason.INVALID_REQUEST,
            why,
            repr((message.body or "")[:RAW_LIMIT_CHARS])[:RAW_LIMIT_CHARS],
            traceparent,
        )
        failure = JobFailed.because(Reason.INVALID_REQUEST, why)
        services.metrics.count(JobStatus.FAILED, Reason.INVALID_REQUEST.value)

        def recorded(answer: object) -> None:
            if isinstance(answer, Exception):
                log.critical("a refused message (task id %r) can't be recorded: %r", task_id, answer)
            self.pool.post(message.ack_log_error, log, self.connection_errors)

        services.writer.reject(rejection, recorded)
        if is_text(task_id):
            backend = self.app.backend
            services.telemetry.result(
                lambda out: put_result(out, backend, task_id, failure, states.FAILURE, anew=True), _nobody
            )
            if self.event_dispatcher:
                # Flower shows the producer's own event, with the prompt in it, until it hears of a newer one.
                shown = {"name": str(headers.get("task")), "args": "-", "kwargs": f"job {task_id}"}
                self.event_dispatcher.send("task-received", uuid=task_id, **shown)
                self.event_dispatcher.send("task-failed", uuid=task_id, exception=repr(failure))

    def ensure_connected(self, conn: Any) -> Any:
        """Connect once the broker answers, and until then let the pool's jobs come to their ends."""
        with BrokerProbe(self.app.conf.broker_url) as probe:
            while not probe.answered.is_set():
                self._meanwhile()
        JobChannel.silent = False

        def on_error(exc: Exception, interval_s: float) -> None:
            log.error("the broker can't be used: %s; trying again in %g s", exc, interval_s)

        conn.ensure_connection(
            on_error,
            None,
            interval_start=0.5,
            interval_step=0.5,
            interval_max=RECONNECT_MAX_S,
            callback=self._meanwhile,
        )
        self.first_connection_attempt = False
        return conn

    def on_send_event_buffered(self) -> None:
        """Send the event with those of the next moment; while the worker leaves, as soon as Celery would."""
        now_s = time.monotonic()
        if self.hub is None or self.pool.leaving:
            super().on_send_event_buffered()
        elif now_s >= self._flush_at_s:
            self._flush_at_s = now_s + EVENTS_S
            self.hub.call_later(EVENTS_S, self._flush_events)

    def stop(self) -> None:
        self._flush_events()
        super().stop()

    def _meanwhile(self) -> None:
        """Do for a moment what the hub would: end jobs, and stop those whose time is up."""
        maybe_shutdown()
        if self.hub is None or self.pool is None:
            time.sleep(PUMP_S)
            return
        before = loops._timer_entries(self.hub.timer)
        self.pool.pump(PUMP_S)
        self.pool.turn_hub()
        if self.timer_entries_before_start is not None:
            # These are time limits and deadlines of jobs; Celery would cancel them with the connection's own.
            self.timer_entries_before_start |= loops._timer_entries(self.hub.timer) - before


def fault(message: Any) -> str | None:
    """Why Celery mustn't have the message: it would drop it, hold it in memory, or run what is none of ours."""
    task = message.headers.get("task")
    if isinstance(task, str) and task.startswith("celery."):
        return f"{task} is not run here"
    eta = message.headers.get("eta")
    # Enough messages for later would keep all others out.
    if eta and maybe_make_aware(maybe_iso8601(eta)) > utc_now():
        return "eta and countdown are not supported: send the job when it is due"
    if not isinstance(message.headers.get("shadow"), str | None):
        return "the task's name to be shown (shadow) must be text"
    if not all(isinstance(limit, int | float | None) for limit in message.headers.get("timelimit") or ()):
        return "the time limits must be numbers of seconds"
    if len(message.body or "") > MAX_BODY_BYTES:
        return f"the body is larger than {MAX_BODY_BYTES // 2**20} MiB"
    with suppress(Exception):  # what can't be decoded is told by Celery
        body = message.payload
        if isinstance(body, list | tuple):
            if [type(part) for part in body] != [list, dict, dict]:
                return "the body must be [arguments, keyword arguments, options]"
            return canvas_fault(body[2])
    return None


def unsigned(message: Any, keys: Sequence[str]) -> str | None:
    """Why the message isn't one that holders of `keys` have signed; None if none are asked for."""
    if not keys:
        return None
    headers = message.headers
    try:
        _, kwargs, _ = message.payload
        signing.check(
            keys, headers.get(signing.SIGNATURE_HEADER), headers["task"], headers["id"], kwargs, utc_now().timestamp()
        )
    except signing.BadSignature as bad:
        return str(bad)
    except Exception:
        return f"the message is not signed (header {signing.SIGNATURE_HEADER})"
    return None


def is_text(task_id: object) -> bool:
    """Whether a result can be stored under the id: somebody may wait for it, also if no job can have it."""
    return isinstance(task_id, str) and bool(task_id) and task_id.encode(errors="ignore").decode() == task_id


def _nobody(_: object) -> None:
    """Nobody waits for this."""
