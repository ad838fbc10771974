"""Runs the HTTP door."""

from __future__ import annotations

import signal
import socket
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI

from api.app import create_app
from settings import Settings

SHUTDOWN_S = 5
"""How long answers that were being given may take to end."""


class Server(uvicorn.Server):
    """Ends long-polls and event streams as soon as it stops."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        config = uvicorn.Config(
            app,
            host=settings.api.host,
            port=settings.api.port,
            timeout_graceful_shutdown=SHUTDOWN_S,
            access_log=False,
            server_header=False,
        )
        super().__init__(config)
        self._app = app

    @property
    def port(self) -> int:
        """The port that it listens on, once it has started."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop for a signal, and keep no account of it: uvicorn would die of the signal after a clean shutdown."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.door.closing.set()
        await super().shutdown(sockets)


def run_api(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM, then return. Exits with 1 if it can't start."""
    server = Server(create_app(settings), settings)
    server.run()
    if not server.started:
        sys.exit(1)
