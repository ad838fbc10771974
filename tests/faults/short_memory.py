"""Loaded into a worker with `-I tests.faults.short_memory`: its CPU model has little memory for a step's activations.

Somebody else has taken it since the worker's start, which tries a step of the largest size.
"""

from __future__ import annotations

import threading

from kernels.cpu.step import ModelStep, StepWork
from kernels.sampling import Sampled, SamplingBatch

MOST_TOKENS = 24
"""Of a step."""
MOST_CONTEXT_TOKENS = 100
"""Of a request: attention over more of them has no memory, in however small a step."""

_run = ModelStep.run


def _run_short(self: ModelStep, work: StepWork, sampling: SamplingBatch, arena: int) -> Sampled:
    starting = threading.current_thread() is threading.main_thread()
    if not starting and (len(work.token_ids) > MOST_TOKENS or max(work.context_len) > MOST_CONTEXT_TOKENS):
        raise MemoryError("no memory for activations")
    return _run(self, work, sampling, arena)


ModelStep.run = _run_short  # type: ignore[method-assign]
