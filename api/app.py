"""The HTTP door as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import RedirectResponse
from fastapi_offline import FastAPIOffline
from headrace.contract import JobRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from api import errors, openapi
from api.door import open_door
from api.hosts import LocalNames
from api.metrics import CountRequests, Metrics
from api.routes import dead_letters, events, health, jobs, models
from settings import Settings

DESCRIPTION = """LLM inference as jobs on a message queue. Submit a job, then poll, long-poll or follow it.

Every error is `{"error": {"message", "type", "param", "code"}}`. A submission with an idempotency key may be
repeated as often as wanted: one job comes of it."""


class WithoutSlash:
    """Takes `/v1/jobs/` for `/v1/jobs`. A redirect would name a host that the client perhaps can't reach."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)


def create_app(settings: Settings) -> FastAPI:
    """An application that opens its parts when it starts, and closes them when it stops."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_door(settings, metrics) as door:
            app.state.door = door
            yield

    app = FastAPIOffline(
        title="Headrace",
        version="0.1.0",
        summary="LLM inference as jobs",
        description=DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    for module in (jobs, events, dead_letters, models, health):
        app.include_router(module.router)
    app.add_api_route("/", lambda: RedirectResponse("docs"), include_in_schema=False)
    errors.install(app)
    openapi.install(app, JobRequest)
    app.add_middleware(CountRequests, metrics=metrics)
    app.add_middleware(WithoutSlash)
    if settings.api.is_local:
        app.add_middleware(LocalNames)
    return app
