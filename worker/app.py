"""The Celery application: `celery -A worker.app worker`, `inspect`, `flower`.

Importing it reads the settings and loads nothing: the model comes with the pool.
"""

from __future__ import annotations

import itertools
import logging
import os
from typing import Any

import redis
from celery import Celery, Task, concurrency
from celery.signals import after_setup_logger, celeryd_init
from celery.utils.nodenames import gethostname
from headrace.wire import celery_config, queue_name, worker_key
from kombu.entity import Queue

from settings import Settings, get_settings
from worker import garbage

POOL = "worker.pool:EnginePool"
SILENCE_S = 3.0
"""A broker that takes longer for an answer is away: the hub waits for it once, and for no longer than this."""


class JobTask(Task):  # type: ignore[misc]  # Celery has no types
    """Every task's deliveries are handled by `worker.strategy` and `worker.message`."""

    Strategy = "worker.strategy:strategy"
    Request = "worker.message:JobMessage"


def worker_config(settings: Settings) -> dict[str, Any]:
    """What a worker needs besides `headrace.wire.celery_config`."""
    queue = queue_name(settings.model.name)
    return {
        "worker_pool": POOL,
        "worker_consumer": "worker.consumer:JobConsumer",
        "worker_concurrency": settings.model.max_num_seqs,
        "worker_prefetch_multiplier": 1,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_enable_prefetch_count_reduction": False,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        "worker_soft_shutdown_timeout": 0,
        "worker_eta_task_limit": 4 * settings.model.max_num_seqs,
        "task_acks_late": True,
        "task_track_started": False,
        "task_default_queue": queue,
        "task_queues": [Queue(queue)],  # type: ignore[no-untyped-call]
        "task_create_missing_queues": True,
        "control_queue_expires": 60.0,
        "result_expires": settings.retention.events_s,
        "broker_transport_options": {
            **celery_config(settings.broker_url)["broker_transport_options"],
            "socket_timeout": SILENCE_S,
            "socket_connect_timeout": SILENCE_S,
        },
        # Results are written by the telemetry thread, which has patience of its own.
        "result_backend_transport_options": {"retry_policy": {"max_retries": 0}},
    }


def make_app(settings: Settings) -> Celery:
    """The application for one model."""
    os.environ.setdefault("CELERY_CUSTOM_WORKER_POOL", POOL)
    concurrency.ALIASES["custom"] = os.environ["CELERY_CUSTOM_WORKER_POOL"]
    made = Celery(
        "headrace", task_cls=JobTask, events="worker.events:JobEvents", include=["worker.tasks", "worker.control"]
    )
    made.conf.update(celery_config(settings.broker_url))
    made.conf.update(worker_config(settings))
    made.steps["worker"].add("worker.steps:RelayStep")
    made.steps["consumer"].add("worker.lease:LeaseStep")
    return made


@after_setup_logger.connect(weak=False)  # type: ignore[untyped-decorator]  # Celery has no types
def _quieten(loglevel: int | None, **_: Any) -> None:
    """Two lines for each job cost more than its claim, and say less than the ledger: they are for debugging."""
    if loglevel is None or loglevel > logging.DEBUG:
        for name in ("celery.worker.strategy", "celery.app.trace"):
            logging.getLogger(name).setLevel(logging.WARNING)


@celeryd_init.connect(weak=False)  # type: ignore[untyped-decorator]  # Celery has no types
def _prepare(instance: Any, **_: Any) -> None:
    """Before anything is loaded. A node that wasn't named is called after its model; the second one on a host gets a
    number."""
    from worker.leaving import leave_by_the_loop

    garbage.postpone()
    leave_by_the_loop()
    if instance.hostname == f"celery@{gethostname()}":
        instance.hostname = free_node_name(get_settings())


def free_node_name(settings: Settings) -> str:
    """The first of `model@host`, `model-2@host`, ... that no worker shows on the broker now."""
    host, model = gethostname(), settings.model.name
    names = (f"{model}@{host}" if n == 1 else f"{model}-{n}@{host}" for n in itertools.count(1))
    with redis.Redis.from_url(settings.broker_url, socket_timeout=2, socket_connect_timeout=2) as client:
        try:
            return next(name for name in names if not client.exists(worker_key(name)))
        except redis.RedisError:
            return f"{model}@{host}"


app = make_app(get_settings())
