"""What a scraper sees of the engine."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake import FakeModel
from engine.request import EngineRequest, SamplingParams
from worker.metrics import Metrics


def test_the_engine_is_shown_as_it_is_when_it_is_scraped() -> None:
    engine = Engine(FakeModel(), EngineConfig("fake", max_num_seqs=1))
    metrics = Metrics("fake")
    metrics.watch(engine.stats)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model": "fake", **labels})

    for number, priority in enumerate([0, 2, 2, 1]):
        engine.add(EngineRequest(str(number), SamplingParams(max_tokens=3), "x" * 40, priority=priority))
    engine.step()
    assert value("headrace_engine_running_by_priority", priority="high") == 1
    assert value("headrace_engine_waiting_by_priority", priority="low") == 2
    assert value("headrace_engine_waiting_by_priority", priority="normal") == 1
    assert value("headrace_engine_running_by_priority", priority="low") == 0
    assert (value("headrace_engine_running"), value("headrace_engine_waiting")) == (1, 3)
    while engine.has_work:
        engine.step()
    assert value("headrace_prompt_tokens_total") == 160
    assert value("headrace_prompt_tokens_cached_total") == 3 * 32
    assert value("headrace_generation_tokens_total") == 12
    assert value("headrace_preemptions_total") == value("headrace_swaps_total") == 0
    assert value("headrace_cache_evictions_total") == 0
    assert value("headrace_engine_pages_swapped") == 0
    assert value("headrace_engine_pages_free") == value("headrace_engine_pages_total")
    fragmentation = value("headrace_engine_fragmentation")
    assert fragmentation is not None
    assert 0 <= fragmentation <= 1
