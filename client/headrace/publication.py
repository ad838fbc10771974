"""Many jobs' messages in one round trip, as Celery's `send_task` writes them, at a small part of its cost.

Tools that trace publications (OpenTelemetry, Sentry) listen to Celery's signals: while any do, Celery itself sends,
and OpenTelemetry's spans of it join the trace of the job.
"""

from __future__ import annotations

import uuid
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from headrace.contract import Priority
from headrace.signing import SIGNATURE_HEADER, sign
from headrace.tracing import TRACEPARENT, joined
from headrace.wire import TASK_GENERATE, message_options, priority_key

PERSISTENT = 2
"""AMQP's delivery mode, which every message of Celery's names."""


@dataclass(frozen=True, slots=True)
class JobMessage:
    """What one job's message says. `kwargs` are JSON-ready."""

    job_id: str
    model: str
    priority: Priority
    kwargs: dict[str, Any]
    traceparent: str | None = None

    def options(self, signing_key: str | None) -> dict[str, Any]:
        """Arguments of `send_task`."""
        options = message_options(self.job_id, self.model, self.priority)
        headers = {}
        if signing_key:
            headers[SIGNATURE_HEADER] = sign(signing_key, self.job_id, self.kwargs)
        if self.traceparent is not None:
            headers[TRACEPARENT] = self.traceparent
        if headers:
            options["headers"] = headers
        return {"kwargs": self.kwargs, **options}

    def send(self, app: Any, signing_key: str | None, **options: Any) -> None:
        """By Celery itself."""
        with joined(self.traceparent):
            app.send_task(TASK_GENERATE, **options, **self.options(signing_key))


def publish(app: Any, producer: Any, messages: Sequence[JobMessage], signing_key: str | None = None) -> None:
    """Send the messages in their order, through a producer of `app`'s. Raises what its connection raises."""
    from celery import signals
    from celery.utils.nodenames import anon_nodename

    if signals.before_task_publish.receivers or signals.after_task_publish.receivers:
        with producer.batch(len(messages)):
            for message in messages:
                message.send(app, signing_key, producer=producer)
        return
    channel = producer.channel
    origin = anon_nodename()
    events = []
    with channel.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
        for message in messages:
            options = message.options(signing_key)
            envelope, sent = composed(app, message.job_id, options, origin)
            pipe.lpush(priority_key(message.model, options["priority"]), to_json(envelope))
            events.append(sent)
        pipe.execute()
    _tell(app, producer, events)


def composed(app: Any, job_id: str, options: dict[str, Any], origin: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A message as it lies on its list, and the event that it was sent. `origin` says who sent it."""
    queue, priority = options["queue"], options["priority"]
    headers, properties, body, sent = app.amqp.as_task_v2(
        job_id,
        TASK_GENERATE,
        kwargs=options["kwargs"],
        reply_to=app.thread_oid,
        create_sent_event=True,
        ignore_result=None,
        origin=origin,
        argsrepr=options["argsrepr"],
        kwargsrepr=options["kwargsrepr"],
    )
    envelope = {
        "body": b64encode(to_json(body)),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {**headers, **(options.get("headers") or {})},
        "properties": {
            **properties,
            "delivery_mode": PERSISTENT,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": priority,
            "body_encoding": "base64",
            "delivery_tag": str(uuid.uuid4()),
        },
    }
    return envelope, {**sent, "queue": queue, "exchange": "", "routing_key": queue}


def _tell(app: Any, producer: Any, events: Sequence[dict[str, Any]]) -> None:
    """Have Flower and the like know of the messages, in one publication. If they can't, the messages are sent still."""
    dispatcher = app.events.Dispatcher(
        producer.connection, channel=producer.channel, buffer_group=("task",), buffer_limit=len(events) + 1
    )
    for event in events:
        dispatcher.send("task-sent", **event)
    dispatcher.flush()
