from __future__ import annotations

import pytest

from bench.endurance.growth import Bounds, Growth, Sample

BOUNDS = Bounds(resident_bytes=1.0, objects=0.01, blocks=0.1)


def samples(resident: float = 0.0, objects: float = 0.0, blocks: float = 0.0) -> list[Sample]:
    """Eleven of them, 1000 tokens apart, that grow so for each token and waver."""
    return [
        Sample(
            tokens := 1000 * number,
            10_000_000 + round(tokens * resident) + 300 * (number % 2),
            40_000 + round(tokens * objects) + 3 * (number % 2),
            170_000 + round(tokens * blocks),
        )
        for number in range(11)
    ]


def test_what_wavers_about_a_level_does_not_grow() -> None:
    assert Growth.of(samples()).beyond(BOUNDS) == []
    assert Growth.of(samples(resident=0.9, objects=0.009, blocks=0.09)).beyond(BOUNDS) == []


@pytest.mark.parametrize(
    ("kind", "slope", "told"),
    [("resident", 1.2, "resident bytes"), ("objects", 0.02, "objects"), ("blocks", 0.2, "blocks")],
)
def test_what_grows_is_told(kind: str, slope: float, told: str) -> None:
    growth = Growth.of(samples(**{kind: slope}))
    [found] = growth.beyond(BOUNDS)
    assert told in found
    assert growth.tokens == 10_000


def test_a_sample_sees_what_is_kept() -> None:
    before = Sample.take(0)
    kept = [[number] for number in range(5000)]
    after = Sample.take(1)
    few = 500  # that others may have let go meanwhile
    assert after.objects - before.objects > len(kept) - few
    assert after.blocks - before.blocks > len(kept) - few
    assert after.resident_bytes > 0
