"""Loaded into a worker with `-I tests.saboteur`: the loop of its engine fails at its fiftieth step."""

from __future__ import annotations

from engine.engine import Engine
from engine.reports import StepResult

_step = Engine.step
_steps = iter(range(50))


def _failing_step(self: Engine) -> StepResult:
    if next(_steps, None) is None:
        raise RuntimeError("sabotage")
    return _step(self)


Engine.step = _failing_step  # type: ignore[method-assign]
