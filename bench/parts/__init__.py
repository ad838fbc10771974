"""The benchmark's parts. Each measures on its own, records its results, and leaves no process."""

from __future__ import annotations

from collections.abc import Callable

from bench.context import Bench
from bench.parts import jobs, naive, online, stall, start, sweep, workloads

PARTS: dict[str, Callable[[Bench], None]] = {
    "w1": workloads.measure,
    "w2": workloads.measure,
    "w3": workloads.measure,
    "start": start.measure,
    "jobs": jobs.measure,
    "stall": stall.measure,
    "online": online.measure,
    "sweep": sweep.measure,
    "naive": naive.measure,
}
