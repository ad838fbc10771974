"""How long there was a worker, as the soak counts it."""

from __future__ import annotations

import math
from datetime import datetime

import pytest

from tests.faults.attendance import attended_s, ready_s, stays


def test_a_worker_is_there_once_it_says_so() -> None:
    log = "a warning\n\n[2026-01-02 03:04:05,250: INFO/MainProcess] w1@test ready.\n"
    first = datetime(2026, 1, 2, 3, 4, 5, 250_000).timestamp()
    assert ready_s(log + "[2026-01-02 03:05:00,000: INFO/MainProcess] w1@test ready.\n") == first
    assert ready_s("a warning\n[2026-01-02 03:04:05,250: INFO/MainProcess] metrics: port 1\n") is None


@pytest.mark.parametrize(
    ("away", "there"),
    [
        ([], [(10, 50)]),
        ([(20, 30)], [(10, 20), (30, 50)]),
        ([(40, math.inf), (20, 30)], [(10, 20), (30, 40)]),
        ([(5, 15), (60, 70)], [(15, 50)]),
        ([(5, 60)], []),
    ],
)
def test_it_is_there_but_for_when_it_is_away(away: list[tuple[float, float]], there: list[tuple[float, float]]) -> None:
    assert list(stays(10, 50, away)) == there


def test_what_several_attend_counts_once() -> None:
    there = [(0, 10), (5, 20), (6, 7), (30, 40)]
    assert attended_s(there, 2, 35) == 23
    assert attended_s(there, 20, 30) == 0
