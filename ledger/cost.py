"""What the ledger costs a process, as its metrics tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

NAME = "headrace_ledger_cpu_seconds"


class LedgerCost(Collector):
    """Processor time of the threads that work for the ledger alone: SQLite's work is in it, a server's is not."""

    def __init__(self, cpu_s: Callable[[], float]) -> None:
        self._cpu_s = cpu_s

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(NAME, "Processor time of the threads that work for the ledger", value=self._cpu_s())
