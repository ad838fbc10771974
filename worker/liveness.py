"""Whether this worker still does what it is for: its hub turns, it takes what waits for it, its engine steps.

A broker or a database that is away is no reason to replace a worker: it waits for them, and jobs go on meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from engine.contract import EngineStats

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

PATH = "/livez"
HUB_S = 20.0
"""The hub looks at its timers every second; it may wait this long for a broker that is silent."""
STARVED_S = 30.0
"""How long messages may wait while there is room for them here."""
STALLED_S = 120.0
"""No step of any model takes as long."""


class Liveness:
    """What the hub notes as it works, all moments on the monotonic clock; other threads ask for `problem`."""

    def __init__(self, now_s: float) -> None:
        self._turned_s = now_s
        self._starved_since_s: float | None = None

    def turned(self, now_s: float) -> None:
        """The hub came round once more."""
        self._turned_s = now_s

    def took(self) -> None:
        """A message came."""
        self._starved_since_s = None

    def saw(self, waiting: int, room: bool, now_s: float) -> None:
        """So many messages wait on the broker; `room` says whether this worker would take one."""
        if not waiting or not room:
            self._starved_since_s = None
        elif self._starved_since_s is None:
            self._starved_since_s = now_s

    def problem(self, engine: EngineStats, now_s: float) -> str | None:
        """Why the worker is to be replaced, or None if all is well."""
        if engine.failure is not None:
            return engine.failure
        if now_s - self._turned_s > HUB_S:
            return f"the hub has not turned for {now_s - self._turned_s:.0f} s"
        if self._starved_since_s is not None and now_s - self._starved_since_s > STARVED_S:
            return f"messages wait and none has been taken for {now_s - self._starved_since_s:.0f} s"
        if engine.running and now_s - engine.last_step_s > STALLED_S:
            return f"the engine has made no step for {now_s - engine.last_step_s:.0f} s"
        return None


def answer_liveness(server: WSGIServer, problem: Callable[[], str | None]) -> None:
    """Have the server of the metrics answer `/livez` too: 200, or 503 with the problem."""
    metrics: Any = server.get_app()

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] != PATH:
            answer: Iterable[bytes] = metrics(environ, start_response)
            return answer
        found = problem()
        body = json.dumps({"status": "ok" if found is None else "failing", "problem": found}).encode()
        status = "200 OK" if found is None else "503 Service Unavailable"
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    server.set_app(app)
