"""Angles of the rotary position embedding. No torch here."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engine.model.spec import ModelSpec, RopeSpec
from engine.model.weights import Weights


def rotary_table_of(spec: ModelSpec, source: Weights, positions: int) -> NDArray[np.float32]:
    """The model's `rotary_table` for its first `positions` positions."""
    factors = source["rope_factors"].float32() if "rope_factors" in source else None
    return rotary_table(spec.rope, spec.head_size, positions, factors)


def rotary_table(
    rope: RopeSpec, head_size: int, positions: int, factors: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Cosines and sines [positions, 2, head_size / 2]; `factors` [head_size / 2] divide the frequencies."""
    frequency = rope.theta ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    if rope.llama3 is not None:
        scaling = rope.llama3
        turns = scaling.original_context_len * frequency / (2 * math.pi)
        share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        share = share.clip(0, 1)
        frequency = frequency * (share + (1 - share) / scaling.factor)
    if factors is not None:
        frequency = frequency / factors.astype(np.float64)
    angle = np.arange(positions, dtype=np.float64)[:, None] * (frequency / rope.linear_factor)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
