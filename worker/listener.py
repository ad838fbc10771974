"""The engine's ears: what it does goes to the hub and to telemetry, and the engine goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.request import RequestOutput, TokenDelta
from worker.telemetry import Telemetry

if TYPE_CHECKING:
    from worker.pool import EnginePool


class Listener:
    """An `engine.contract.EngineListener`. Called on the engine's thread."""

    def __init__(self, pool: EnginePool, telemetry: Telemetry) -> None:
        self._pool = pool
        self._telemetry = telemetry

    def on_admitted(self, request_id: str, admitted_s: float) -> None:
        self._pool.post(self._pool.admitted, request_id)

    def on_tokens(self, deltas: Sequence[TokenDelta]) -> None:
        self._telemetry.tokens(deltas)

    def on_finished(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self._pool.post(self._pool.finished, output)
