"""Holds an answer back until a job has ended. A waiter costs two small tasks and no thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from headrace.contract import Job
from starlette.requests import Request

from api.door import Door


async def hold(door: Door, request: Request, job: Job, wait_s: float) -> Job:
    """The job when it has ended, or as it is when the time is up, the client gone or the process stopping."""
    until_s = time.monotonic() + wait_s
    with door.watch.waiting(job.id) as ended:
        released = [asyncio.create_task(_gone(request)), asyncio.create_task(_closing(door))]
        try:
            while True:
                job = await door.job(job.id) or job
                left_s = until_s - time.monotonic()
                if job.status.terminal or left_s <= 0 or any(task.done() for task in released):
                    return job
                ended.clear()
                await _first(left_s, ended.wait(), *released)
        finally:
            for task in released:
                task.cancel()


async def _first(timeout_s: float, event: Coroutine[Any, Any, Any], *released: asyncio.Task[None]) -> None:
    waiter = asyncio.create_task(event)
    try:
        await asyncio.wait({waiter, *released}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _closing(door: Door) -> None:
    await door.closing.wait()
