"""What happened in the engine and was not told yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.counters import Counters
from engine.request import EngineRequest, FinishReason, RequestMetrics, RequestOutput, RequestRefused, TokenDelta


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did: who was admitted for the first time, what was added to outputs, who ended."""

    admitted: tuple[tuple[str, float], ...]
    """Request id and monotonic moment."""
    deltas: tuple[TokenDelta, ...]
    finished: tuple[RequestOutput, ...]


class Reports:
    """Deltas and outputs until the next step tells of them; every output is counted once."""

    def __init__(self, counters: Counters, clock: Callable[[], float]) -> None:
        self._counters = counters
        self._clock = clock
        self._deltas: list[TokenDelta] = []
        self._finished: list[RequestOutput] = []

    @property
    def ended(self) -> bool:
        """Whether an end is to be told."""
        return bool(self._finished)

    def add(self, delta: TokenDelta | None) -> None:
        if delta is not None:
            self._deltas.append(delta)

    def finish(self, output: RequestOutput) -> None:
        self._counters.requests_finished[output.finish_reason.value] += 1
        self._finished.append(output)

    def take(self, admitted: tuple[tuple[str, float], ...] = ()) -> StepResult:
        """All of it; it is told then."""
        result = StepResult(admitted, tuple(self._deltas), tuple(self._finished))
        self._deltas.clear()
        self._finished.clear()
        return result

    def refused(self, request: EngineRequest, refused: RequestRefused, arrived_s: float) -> RequestOutput:
        """The output of a request that can't run."""
        return self._outside(request, arrived_s, FinishReason.ERROR, str(refused), refused.code)

    def aborted(self, request: EngineRequest, arrived_s: float) -> RequestOutput:
        """The output of a request that was dropped before it entered."""
        return self._outside(request, arrived_s, FinishReason.ABORT)

    def _outside(
        self,
        request: EngineRequest,
        arrived_s: float,
        reason: FinishReason,
        error: str | None = None,
        code: str | None = None,
    ) -> RequestOutput:
        self._counters.requests_finished[reason.value] += 1
        metrics = RequestMetrics(arrived_s, None, None, None, self._clock())
        return RequestOutput(request.id, (), (), "", reason, None, metrics, error, code)
