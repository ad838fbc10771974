"""What the routes share: the open parts of one running API process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, ParamSpec, TypeVar

import redis.asyncio
from anyio import to_thread
from fastapi import Depends, Request
from headrace.contract import Job, new_job_id
from headrace.wire import WORKER_KEY_PREFIX

from api.admission import Admission
from api.bounds import QueueBounds
from api.keyring import Keyring
from api.metrics import Metrics
from api.rates import Rates
from api.streams import StreamNews
from api.threads import LedgerThreads
from api.watch import EndWatch
from ledger import Ledger
from ledger.contract import LedgerUnavailable, Windows
from ledger.relay import Relay
from ledger.retention import kept
from ledger.transport import CeleryTransport
from settings import Settings

BROKER_CONNECTIONS = 64
SILENCE_S = 3.0
"""A broker that takes longer for an answer is away."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Door:
    settings: Settings
    ledger: Ledger
    broker: redis.asyncio.Redis
    relay: Relay
    watch: EndWatch
    streams: StreamNews
    admission: Admission
    keyring: Keyring
    rates: Rates
    bounds: QueueBounds
    metrics: Metrics
    threads: LedgerThreads
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process stops: whoever holds an answer back gives it now."""

    async def call(self, method: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one of the ledger's methods on a thread."""
        return await self.threads.call(method, *args, **kwargs)

    async def job(self, job_id: str, tenant: str | None = None) -> Job | None:
        """The job, if there is one, and it is the tenant's where one is named."""
        return await self.call(self.ledger.get, job_id, tenant)

    async def workers(self) -> dict[str, str]:
        """Names of the workers that consume now, with their models; an unreadable entry doesn't count."""
        keys = [key async for key in self.broker.scan_iter(match=f"{WORKER_KEY_PREFIX}*", count=1000)]
        found: dict[str, str] = {}
        for key, value in zip(keys, await self.broker.mget(keys) if keys else [], strict=True):
            with suppress(ValueError, TypeError, KeyError):
                found[key.removeprefix(WORKER_KEY_PREFIX)] = str(json.loads(value or "")["model"])
        return found

    async def sample_jobs(self) -> None:
        """Bring the gauges of jobs up to date, unless that was done a moment ago or the database is away."""
        if self.metrics.jobs_due():
            with suppress(LedgerUnavailable):
                self.metrics.set_jobs(await self.call(self.ledger.counts))


@asynccontextmanager
async def open_door(settings: Settings, metrics: Metrics) -> AsyncIterator[Door]:
    """Open everything; neither broker nor database has to be there yet."""
    threads = LedgerThreads()
    ledger = Ledger(settings.ledger_url)
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        settings.broker_url,
        decode_responses=True,
        socket_connect_timeout=2.0,
        socket_timeout=SILENCE_S,
        max_connections=BROKER_CONNECTIONS,
        timeout=5,
    )
    broker = redis.asyncio.Redis.from_pool(pool)
    transport, view = (CeleryTransport(settings.broker_url, settings.signing_secret) for _ in range(2))
    relay = Relay(
        ledger,
        transport,
        f"api-{new_job_id()}",
        settings.relay_interval_s,
        broker=view,
        windows=Windows(settings.queue.window_jobs, settings.model.tenant_weights),
        aging_s=settings.model.aging_s,
        retention=kept(settings.retention),
    )

    async def ended(job_ids: Collection[str]) -> frozenset[str]:
        return await threads.call(ledger.ended, list(job_ids))

    watch = EndWatch(broker, ended)
    streams = StreamNews(broker)
    admission, keyring = Admission(ledger, threads), Keyring(ledger.keys, threads)
    bounds = QueueBounds(ledger, threads, settings.queue)
    rates = Rates(broker, settings.broker_url, settings.api)
    door = Door(settings, ledger, broker, relay, watch, streams, admission, keyring, rates, bounds, metrics, threads)
    metrics.watch_ledger(lambda: threads.cpu_s + relay.cpu_s)
    relay.start()
    try:
        async with _running(watch.listen(), watch.look(), streams.run()):
            yield door
    finally:
        door.closing.set()
        await to_thread.run_sync(relay.stop)
        transport.close()
        view.close()
        await broker.aclose()
        ledger.close()


@asynccontextmanager
async def _running(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run endless work beside the body."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _door(request: Request) -> Door:
    door: Door = request.app.state.door
    return door


TheDoor = Annotated[Door, Depends(_door)]
