"""A worker that no longer does what it is for says so; one that only waits does not."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import replace
from urllib.error import HTTPError

import pytest

from engine.contract import EngineStats
from tests.unit.engine.bench import make_bench
from worker.liveness import HUB_S, STALLED_S, STARVED_S, Liveness, answer_liveness
from worker.metrics import Metrics, serve_metrics


@pytest.fixture
def idle() -> EngineStats:
    return replace(make_bench().engine.stats(), last_step_s=0.0)


def test_a_worker_with_nothing_to_do_is_well(idle: EngineStats) -> None:
    liveness = Liveness(0.0)
    liveness.turned(10_000.0)
    assert liveness.problem(idle, 10_001.0) is None


def test_a_hub_that_stands_is_a_problem(idle: EngineStats) -> None:
    assert "the hub has not turned" in (Liveness(0.0).problem(idle, HUB_S + 1) or "")


def test_messages_that_nobody_takes_are_a_problem(idle: EngineStats) -> None:
    """https://github.com/celery/celery/discussions/8030: the worker is connected and consumes no more."""
    liveness = Liveness(0.0)
    liveness.saw(3, room=True, now_s=1.0)
    liveness.saw(2, room=True, now_s=STARVED_S)
    late = STARVED_S + 2
    liveness.turned(late)
    assert "none has been taken" in (liveness.problem(idle, late) or "")
    liveness.took()
    assert liveness.problem(idle, late) is None


@pytest.mark.parametrize(("waiting", "room"), [(0, True), (3, False)])
def test_an_empty_queue_and_a_full_worker_are_none(idle: EngineStats, waiting: int, room: bool) -> None:
    liveness = Liveness(0.0)
    liveness.saw(3, room=True, now_s=0.0)
    liveness.saw(waiting, room, now_s=1.0)
    liveness.turned(1000.0)
    assert liveness.problem(idle, 1000.0) is None


def test_an_engine_that_makes_no_step_is_a_problem(idle: EngineStats) -> None:
    liveness, late = Liveness(0.0), STALLED_S + 1
    liveness.turned(late)
    assert "no step" in (liveness.problem(replace(idle, running=1), late) or "")
    assert liveness.problem(replace(idle, running=1, last_step_s=late - 1), late) is None
    assert liveness.problem(replace(idle, failure="it broke"), late) == "it broke"


def test_is_answered_beside_the_metrics() -> None:
    problems: list[str] = []
    server = serve_metrics(Metrics("m"), "127.0.0.1", 0)
    try:
        answer_liveness(server, lambda: problems[0] if problems else None)
        url = f"http://127.0.0.1:{server.server_port}"
        with urllib.request.urlopen(f"{url}/livez") as answer:
            assert json.load(answer) == {"status": "ok", "problem": None}
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            assert b"headrace_jobs_ended" in answer.read()
        problems.append("it stands")
        with pytest.raises(HTTPError) as failing:
            urllib.request.urlopen(f"{url}/livez")
        with failing.value as answer:
            assert (answer.code, json.load(answer)["problem"]) == (503, "it stands")
    finally:
        server.shutdown()
        server.server_close()
