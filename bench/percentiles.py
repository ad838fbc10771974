"""Times of requests and tokens, in percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from bench.sides.protocol import Played


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values don't exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def first_token_ms(played: Sequence[Played]) -> list[float]:
    """From each request's arrival to its first token."""
    return [(one["token_s"][0] - one["arrived_s"]) * 1e3 for one in played]


def gaps_ms(played: Sequence[Played], from_s: float = 0.0, until_s: float = math.inf) -> list[float]:
    """Between two tokens of one request, for those that came within a span of time."""
    return [
        (later - earlier) * 1e3
        for one in played
        for earlier, later in pairwise(one["token_s"])
        if from_s <= later <= until_s
    ]
