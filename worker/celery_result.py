"""A job's end as Celery's result backend keeps it, to be sent with the job's events instead of by itself."""

from __future__ import annotations

from typing import Any

from celery import states
from pydantic_core import to_json

from worker.job_stream import Outgoing


def put_result(out: Outgoing, backend: Any, task_id: str, value: object, state: str, *, anew: bool = False) -> None:
    """What `backend.store_result` does on Redis, but for its look at what is there: the ledger has decided.

    `anew` is for what the ledger says nothing of: a result that is there stays.
    """
    meta = backend._get_result_meta(backend.encode_result(value, state), state, None, None)
    meta["task_id"] = task_id
    # A success is plain JSON already, and most results are successes.
    text = to_json(meta) if state == states.SUCCESS and backend.serializer == "json" else backend.encode(meta)
    out.result(backend.get_key_for_task(task_id), text, int(backend.expires), anew)
