"""Whether the process lives, whether it can serve, and its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

import redis
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel

from api.access import Scraper
from api.door import Door, TheDoor
from api.errors import responses
from ledger.contract import LedgerUnavailable

router = APIRouter(tags=["health"])

CHECK_TIMEOUT_S = 3.0


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Check(BaseModel):
    """One thing that has to be there."""

    ok: bool
    message: str
    """What was found, or what to do."""


class Readiness(BaseModel):
    ready: bool
    checks: dict[str, Check]


@router.get("/healthz", summary="Is the process alive?")
async def healthz() -> Health:
    """Answers as long as the process does; looks at nothing else."""
    return Health()


@router.get("/readyz", summary="Can jobs be served?", responses={503: {"model": Readiness}})
async def readyz(door: TheDoor, response: Response) -> Readiness:
    """Broker, database with its schema, and a consuming worker; 503 unless all are there."""
    checks = await asyncio.gather(_in_time(_broker(door)), _in_time(_database(door)), _in_time(_worker(door)))
    named = dict(zip(("broker", "database", "worker"), checks, strict=True))
    ready = all(check.ok for check in checks)
    response.status_code = 200 if ready else 503
    return Readiness(ready=ready, checks=named)


@router.get("/metrics", summary="Prometheus metrics", response_class=Response, responses=responses())
async def metrics(door: TheDoor, _: Scraper) -> Response:
    """Metrics of this process, and the ledger's counts of jobs, read at most every few seconds."""
    await door.sample_jobs()
    door.metrics.waiting.set(door.watch.waiters)
    return Response(generate_latest(door.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _in_time(check: Coroutine[Any, Any, Check]) -> Check:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await check
    except TimeoutError:
        return Check(ok=False, message=f"no answer within {CHECK_TIMEOUT_S:g} s")


async def _broker(door: Door) -> Check:
    try:
        await door.broker.ping()
    except (redis.RedisError, OSError) as error:
        return Check(ok=False, message=f"{error}; is the broker up, and HEADRACE_REDIS_URL right?")
    return Check(ok=True, message="answers")


async def _database(door: Door) -> Check:
    try:
        found, wanted = await door.call(door.ledger.revision)
    except LedgerUnavailable as error:
        return Check(ok=False, message=f"{error}; is the database up, and HEADRACE_DATABASE_URL right?")
    if found != wanted:
        stands = f"at revision {found}" if found else "empty"
        return Check(ok=False, message=f"the database is {stands}, and {wanted} is needed: run 'headrace db upgrade'")
    return Check(ok=True, message=f"at revision {found}")


async def _worker(door: Door) -> Check:
    try:
        workers = await door.workers()
    except (redis.RedisError, OSError) as error:
        return Check(ok=False, message=f"not known: {error}")
    if not workers:
        return Check(ok=False, message="no worker consumes any queue: run 'headrace worker'")
    models = ", ".join(sorted(set(workers.values())))
    return Check(ok=True, message=f"{len(workers)} worker(s), for {models}")
