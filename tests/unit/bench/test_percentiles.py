"""Percentiles of times, counted and not interpolated."""

from __future__ import annotations

from bench.percentiles import first_token_ms, gaps_ms, percentile
from bench.sides.protocol import Played

PLAYED: list[Played] = [
    {"arrived_s": 1.0, "token_s": [1.5, 2.0, 4.0]},
    {"arrived_s": 2.0, "token_s": [2.25]},
]


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile(values, 1.0) == 100
    assert percentile([7.0], 0.99) == 7


def test_first_tokens_count_from_the_arrival_and_gaps_within_a_span() -> None:
    assert first_token_ms(PLAYED) == [500, 250]
    assert gaps_ms(PLAYED) == [500, 2000]
    assert gaps_ms(PLAYED, from_s=2.5) == [2000]
    assert gaps_ms(PLAYED, until_s=3.0) == [500]
