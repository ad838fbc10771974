"""Prometheus metrics of the API process, and the middleware that counts requests."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable

from headrace.contract import JobStatus
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import internal_error
from ledger.cost import LedgerCost

SAMPLE_S = 5.0

log = logging.getLogger(__name__)


class Metrics:
    """One registry for each app, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._due_s = 0.0
        self.requests = Counter(
            "headrace_api_requests_total", "Answers by route and status", ["method", "route", "status"],
            registry=self.registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "headrace_api_request_seconds", "Time to the start of the answer, long-polls included",
            ["method", "route"], registry=self.registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
        )  # fmt: skip
        self.submitted = Counter(
            "headrace_api_jobs_submitted_total", "Jobs accepted, repetitions left out", ["model"],
            registry=self.registry,
        )  # fmt: skip
        self.jobs = Gauge("headrace_jobs", "Jobs in the ledger", ["model", "status"], registry=self.registry)
        self.waiting = Gauge("headrace_api_waiters", "Long-polls and event streams now open", registry=self.registry)

    def watch_ledger(self, cpu_s: Callable[[], float]) -> None:
        """Show what the ledger costs, read when it is scraped."""
        self.registry.register(LedgerCost(cpu_s))

    def jobs_due(self) -> bool:
        """Whether the ledger should be counted again; says so to one caller each five seconds."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + SAMPLE_S
        return True

    def set_jobs(self, counts: dict[str, dict[JobStatus, int]]) -> None:
        self.jobs.clear()
        for model, by_status in counts.items():
            for status in JobStatus:
                self.jobs.labels(model, status).set(by_status.get(status, 0))


class CountRequests:
    """Outermost middleware: counts every answer, and turns a bug into a plain 500.

    The log gets the place of the failure but not the exception's text, which may hold a prompt.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()
        started = False

        async def observed(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._count(scope, message["status"], time.perf_counter() - began_s)
            await send(message)

        try:
            await self._app(scope, receive, observed)
        except Exception as error:
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s %s: %s\n%s", scope["method"], scope["path"], type(error).__name__, where)
            if started:
                raise ConnectionError("the answer was cut off") from None
            await internal_error()(scope, receive, observed)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.requests.labels(method, route, status).inc()
        self._metrics.seconds.labels(method, route).observe(seconds)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
