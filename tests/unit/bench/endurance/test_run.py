"""A short run of everything at once, and the proof that one that leaks is found out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench.endurance.growth import Bounds, Growth
from bench.endurance.random_model import write_random_model
from bench.endurance.run import FaultyModel, Listener, Report, config, run
from engine.request import RequestOutput
from tests.unit.kernels.isas import needs_library

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_library]

BOUNDS = Bounds(resident_bytes=300, objects=0.01, blocks=0.05)
"""A request makes some 20 tokens; one that leaves its output behind leaves some ten objects."""
ROUNDS = 10
WARM_UP = 4


def last_report(place: Path, tokens: int) -> Report:
    engine_config = config(write_random_model(place / "model"))
    *_, report = run(FaultyModel.load(engine_config), engine_config, tokens, ROUNDS, seed=5)
    return report


def test_everything_at_once_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the run asserts by itself: invariants, empty pages, the same greedy tokens in every round."""
    caplog.set_level(100)
    report = last_report(tmp_path, 40_000)
    assert Growth.of(report.samples[WARM_UP:]).beyond(BOUNDS) == []
    assert {
        "stop", "length", "abort", "deadline_exceeded", "engine_error", "invalid_request", "template_error",
        "context_length_exceeded",
    } == set(report.reasons)  # fmt: skip
    assert report.stats.preemptions > 0
    assert report.stats.swaps > 0
    assert report.stats.cached_tokens > 0
    assert report.listener_raised > 0


def test_a_run_that_keeps_its_outputs_is_found_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(100)
    kept: list[RequestOutput] = []
    told = Listener.on_finished

    def keep(self: Listener, outputs: list[RequestOutput]) -> None:
        kept.extend(dataclasses.replace(output) for output in outputs)
        told(self, outputs)

    monkeypatch.setattr(Listener, "on_finished", keep)
    report = last_report(tmp_path, 20_000)
    assert any("objects" in found for found in Growth.of(report.samples[WARM_UP:]).beyond(BOUNDS))
