"""What goes over the broker: names, priorities, and the one Celery configuration that every process shares.

The visibility timeout must be equal in every process that touches the broker, because any of them
may hand back the messages that it believes to be lost. So no process builds its own configuration.
"""

from __future__ import annotations

from typing import Any

from headrace import urls
from headrace.contract import Priority

TASK_GENERATE = "headrace.generate"
TASK_EMBED = "headrace.embed"
"""The same for a request that is to become a vector: it needs no `embed`."""
QUEUE_PREFIX = "headrace."
VISIBILITY_TIMEOUT_S = 60
"""After this long any message that nobody renews is handed out again, whoever's it is."""
STAMP_S = 3.0
"""Workers renew the messages that they hold at least this often."""
SILENT_S = 8.0
"""A message of ours that wasn't renewed for this long was held by a worker that is dead."""

PRIORITY_STEPS = (0, 3, 6, 9)
_BROKER_PRIORITY = {Priority.HIGH: 0, Priority.NORMAL: 3, Priority.LOW: 6}
"""On Redis 0 is served first. Each value is one of the transport's `priority_steps`."""


def broker_priority(priority: Priority) -> int:
    return _BROKER_PRIORITY[priority]


def queue_name(model: str) -> str:
    """The queue whose workers hold `model`."""
    return QUEUE_PREFIX + model


def queue_keys(model: str) -> list[str]:
    """The Redis lists that hold the queue, one for each of the transport's `priority_steps`."""
    return [priority_key(model, step) for step in PRIORITY_STEPS]


def priority_key(model: str, step: int) -> str:
    """The one of them for a priority."""
    name = queue_name(model)
    return f"{name}\x06\x16{step}" if step else name


def stream_key(job_id: str) -> str:
    """Redis stream of a job's events: entries with the field `event` (a JSON object, see `headrace.events`)."""
    return f"headrace:events:{job_id}"


def progress_key(job_id: str) -> str:
    """Redis stream of the same form for a job that doesn't stream: what it has so far, for a worker that takes it
    over. It goes when the job has ended."""
    return f"headrace:progress:{job_id}"


def worker_key(name: str) -> str:
    """Redis key that a worker keeps alive while it consumes: a JSON object with its `model` and the time (`at`)."""
    return f"{WORKER_KEY_PREFIX}{name}"


WORKER_KEY_PREFIX = "headrace:worker:"
WORKER_KEY_TTL_S = 15
"""A worker's key is written again every fifth of this, so a dead worker is gone from view within it."""

DONE_CHANNEL = "headrace:done"
"""Redis pub/sub channel; each message is the ids, with spaces between, of jobs that have just ended."""

STREAM_TTL_S = 3600
"""How long a job's event stream is kept after its last event, if nothing else is set; the ledger keeps the outcome."""


def celery_config(broker_url: str) -> dict[str, Any]:
    """Celery settings common to producers, relay, Flower and workers."""
    broker_url = urls.broker(broker_url)
    return {
        "broker_url": broker_url,
        "result_backend": broker_url,
        "result_expires": 3600,
        "broker_transport_options": {
            "visibility_timeout": VISIBILITY_TIMEOUT_S,
            "unacked_restore_interval": 2,
            "unacked_restore_throttle": 1,
            "queue_order_strategy": "priority",
            "priority_steps": list(PRIORITY_STEPS),
            "socket_keepalive": True,
            "health_check_interval": 10,
        },
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_channel_error_retry": True,
        "task_serializer": "json",
        "result_serializer": "json",
        "event_serializer": "json",
        "accept_content": ["json"],
        "task_send_sent_event": True,
        "worker_send_task_events": True,
        "enable_utc": True,
        "timezone": "UTC",
    }


def message_options(job_id: str, model: str, priority: Priority) -> dict[str, Any]:
    """Options of `send_task` for one job. The prompt shows in no header and no event."""
    return {
        "task_id": job_id,
        "queue": queue_name(model),
        "priority": broker_priority(priority),
        "argsrepr": "-",
        "kwargsrepr": f"job {job_id}",
    }
