"""Plain Celery: its thread pool, late acknowledgement, results in a database. Its task does nothing.

Run by the benchmark as: celery -A bench.noop_worker worker --pool threads
"""

from __future__ import annotations

import os

from celery import Celery

app = Celery("noop", broker=os.environ["NOOP_BROKER_URL"], backend=os.environ["NOOP_BACKEND_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    worker_send_task_events=True,
)


@app.task(name="noop.run")  # type: ignore[untyped-decorator]
def run(prompt: str, max_tokens: int) -> dict[str, str | int]:
    """As much of an answer as Headrace's no-op job gives."""
    return {"text": "", "finish_reason": "length", "completion_tokens": 0}
