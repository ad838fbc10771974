"""The worker's own Prometheus metrics: its jobs, and what its engine holds right now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from wsgiref.simple_server import WSGIServer

from celery.utils.log import get_logger
from headrace.contract import JobStatus, Timings
from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.contract import EngineStats
from engine.request import TokenDelta
from ledger.contract import Outcome
from ledger.cost import LedgerCost
from worker.draft import PRIORITY_NUMBERS

log = get_logger(__name__)

_WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512)


class Metrics:
    """Counters and histograms in a registry of their own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, ["model"], buckets=buckets, registry=self.registry).labels(model)

        self._jobs = Counter(
            "headrace_jobs_ended", "Jobs that ended here", ["model", "status", "reason"], registry=self.registry
        )
        self._ends: dict[tuple[str, str], Counter] = {}
        self._queue = histogram("headrace_queue_seconds", "From acceptance to the engine's admission", _WAITS_S)
        self._first = histogram("headrace_time_to_first_token_seconds", "From the engine's receipt", _WAITS_S)
        self._total = histogram("headrace_job_seconds", "From acceptance to commit", _WAITS_S)
        self._gap = histogram("headrace_inter_token_seconds", "Mean time between a job's tokens", _GAPS_S)
        self._batch = histogram("headrace_step_sequences", "Sequences that gained tokens in a step", _BATCHES)
        self._cancel = histogram("headrace_cancel_to_free_seconds", "From a stop's arrival to free pages", _GAPS_S)

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        """Show the engine's gauges, read when they are scraped."""
        self.registry.register(_EngineCollector(self._model, stats))

    def watch_ledger(self, cpu_s: Callable[[], float]) -> None:
        """Show what the ledger costs, read when it is scraped."""
        self.registry.register(LedgerCost(cpu_s))

    def step(self, deltas: Sequence[TokenDelta]) -> None:
        self._batch.observe(len(deltas))

    def stopped(self, took_s: float) -> None:
        """A running job was stopped: its pages were free `took_s` after the worker had heard of it."""
        self._cancel.observe(took_s)

    def ended(self, outcome: Outcome) -> None:
        """A job's outcome was committed."""
        self.count(outcome.status, outcome.reason.value if outcome.reason else "")
        timings = outcome.timings or Timings()
        for histogram, value_ms in (
            (self._queue, timings.queue_time_ms),
            (self._first, timings.time_to_first_token_ms),
            (self._gap, timings.mean_itl_ms),
            (self._total, timings.total_time_ms),
        ):
            if value_ms is not None:
                histogram.observe(value_ms / 1000)

    def count(self, status: JobStatus, reason: str) -> None:
        """Count a job that ended, also one that never was claimed."""
        ends = status.value, reason
        if ends not in self._ends:
            self._ends[ends] = self._jobs.labels(self._model, *ends)
        self._ends[ends].inc()


class _EngineCollector(Collector):
    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self._model = model
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        now = self._stats()
        for name, text, value in (
            ("headrace_engine_running", "Sequences in the engine", now.running),
            ("headrace_engine_waiting", "Requests that wait for a sequence", now.waiting),
            ("headrace_engine_sequences_max", "Sequences that the engine admits at once", now.max_num_seqs),
            ("headrace_engine_pages_total", "Pages of the KV pool", now.pages_total),
            ("headrace_engine_pages_free", "Pages of the KV pool that no request holds", now.pages_free),
            ("headrace_engine_pages_swapped", "Pages of preempted requests in the host's memory", now.swapped_pages),
            ("headrace_engine_fragmentation", "Share of free places in the KV memory in use", now.fragmentation),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, classes in (
            ("headrace_engine_running_by_priority", "Sequences in the engine, by class", now.running_by_priority),
            ("headrace_engine_waiting_by_priority", "Sequences that wait, by class", now.waiting_by_priority),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model", "priority"])
            for priority, number in PRIORITY_NUMBERS.items():
                gauge.add_metric([self._model, priority.value], classes.get(number, 0))
            yield gauge
        for name, text, value in (
            ("headrace_engine_steps", "Steps of the engine", now.steps),
            ("headrace_prompt_tokens", "Prompt tokens of admitted requests", now.prompt_tokens),
            ("headrace_prompt_tokens_cached", "Prompt tokens that were found computed", now.cached_tokens),
            ("headrace_generation_tokens", "Tokens generated", now.generation_tokens),
            ("headrace_drafted_tokens", "Tokens that were guessed ahead and computed", now.drafted_tokens),
            ("headrace_accepted_tokens", "Guessed tokens that came true", now.accepted_tokens),
            ("headrace_preemptions", "Sequences that gave way to others", now.preemptions),
            ("headrace_swaps", "Preempted sequences whose KV was copied to the host", now.swaps),
            ("headrace_cache_evictions", "Cached pages that gave way to others", now.evictions),
        ):
            counter = CounterMetricFamily(name, text, labels=["model"])
            counter.add_metric([self._model], value)
            yield counter


def serve_metrics(metrics: Metrics, host: str, port: int) -> WSGIServer:
    """Serve the metrics on `port` of `host`, or on a free port if that is taken."""
    try:
        server, _ = start_http_server(port, host, registry=metrics.registry)
    except OSError as exc:
        server, _ = start_http_server(0, host, registry=metrics.registry)
        log.warning("metrics: port %d is taken (%s), moved to %d", port, exc, server.server_port)
    else:
        log.info("metrics: port %d", server.server_port)
    return server
