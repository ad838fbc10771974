"""From a message that has come to a job in the pool: Celery's default strategy, without what no job of ours needs.

What is rare (the old message protocol, a rate limit that somebody has set, a task that isn't ours) goes Celery's own
way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import signals
from celery.worker import strategy as celery_strategy
from celery.worker.state import revoked, task_reserved
from headrace.wire import TASK_EMBED, TASK_GENERATE

from worker.message import JobMessage

OURS = (TASK_GENERATE, TASK_EMBED)
Handler = Callable[[Any, Any, Any, Any, Any], Any]


def strategy(task: Any, app: Any, consumer: Any) -> Handler:
    """What handles this task's messages, for as long as a connection lasts."""
    by_celery: Handler = celery_strategy.default(task, app, consumer)
    if task.name not in OURS:
        return by_celery
    events = consumer.event_dispatcher
    told = events and events.enabled and task.send_events

    def on_message(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any) -> None:
        if body is not None or not isinstance(message.payload, list) or consumer.task_buckets[task.name]:
            by_celery(message, body, ack, reject, callbacks)
            return
        request = JobMessage(
            message,
            on_ack=message.ack_log_error,
            on_reject=message.reject_log_error,
            app=app,
            hostname=consumer.hostname,
            eventer=events,
            task=task,
            connection_errors=consumer.connection_errors,
        )
        if request.expires or request.stamped_headers or request.id in revoked:
            request.revoked()
        if signals.task_received.receivers:
            signals.task_received.send(sender=consumer, request=request)
        if told:
            events.send(
                "task-received",
                uuid=request.id,
                name=request.name,
                args=request.argsrepr,
                kwargs=request.kwargsrepr,
                root_id=request.root_id,
                parent_id=request.parent_id,
                retries=request.request_dict.get("retries", 0),
                eta=None,
                expires=request.expires and request.expires.isoformat(),
            )
        task_reserved(request)
        for callback in callbacks:
            callback(request)
        consumer.on_task_request(request)

    return on_message
