"""What a process holds from time to time, and whether that grows with the tokens that it made."""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from engine.memory.machine import resident_bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """What the process held when so many tokens had been made and nothing ran."""

    tokens: int
    resident_bytes: int
    objects: int
    """That the collector tracks."""
    blocks: int
    """Of memory that Python's allocator gave out, for objects of all kinds."""

    @classmethod
    def take(cls, tokens: int) -> Sample:
        gc.collect()
        return cls(tokens, resident_bytes(), len(gc.get_objects()), sys.getallocatedblocks())


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that may be added for each token, by the fitted line."""

    resident_bytes: float
    objects: float
    blocks: float


@dataclass(frozen=True, slots=True)
class Growth:
    """Slopes of the lines through the samples, for each token."""

    resident_bytes: float
    objects: float
    blocks: float
    tokens: int
    """From the first sample to the last."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Growth:
        return cls(
            resident_bytes=_slope(samples, [sample.resident_bytes for sample in samples]),
            objects=_slope(samples, [sample.objects for sample in samples]),
            blocks=_slope(samples, [sample.blocks for sample in samples]),
            tokens=samples[-1].tokens - samples[0].tokens,
        )

    def beyond(self, bounds: Bounds) -> list[str]:
        """What grows by more than it may, in words."""
        found = {
            "resident bytes": (self.resident_bytes, bounds.resident_bytes),
            "tracked objects": (self.objects, bounds.objects),
            "allocated blocks": (self.blocks, bounds.blocks),
        }
        return [
            f"{name} grow by {slope:.3g} for each token, and may by {most:.3g}"
            for name, (slope, most) in found.items()
            if slope > most
        ]


def _slope(samples: Sequence[Sample], values: Sequence[float]) -> float:
    """Of the line with the least squares."""
    return statistics.linear_regression([sample.tokens for sample in samples], values).slope
