"""Angles of the rotary position embedding. No torch here."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engine.model.spec import Llama3Scaling, LongRopeScaling, ModelSpec, RopeSpec, YarnScaling
from engine.model.weights import Weights

Floats = NDArray[np.float64]


def rotary_table_of(
    spec: ModelSpec, source: Weights, positions: int, rope: RopeSpec | None = None
) -> NDArray[np.float32]:
    """The `rotary_table` of a model, or of one of its two `rope`s, for the first `positions` positions."""
    factors = source["rope_factors"].float32() if "rope_factors" in source else None
    rope = rope or spec.rope
    if rope is None:
        return np.empty((positions, 2, 0), np.float32)
    return rotary_table(rope, spec.head_size, positions, factors)


def rotary_table(
    rope: RopeSpec, head_size: int, positions: int, factors: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Cosines and sines [positions, 2, R / 2] of the R components that are rotated; `factors` [R / 2] divide the
    frequencies. A model that tells long contexts from short ones is asked for all its positions at once."""
    rotated = rope.rotated or head_size
    frequency = rope.theta ** (-np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    match rope.scaling:
        case Llama3Scaling():
            frequency = _llama3(frequency, rope.scaling)
        case YarnScaling():
            frequency = _yarn(frequency, rope.scaling, rope.theta)
        case LongRopeScaling(short, long, original):
            frequency = frequency / np.array(short if positions <= original else long)
    if factors is not None:
        frequency = frequency / factors.astype(np.float64)
    angle = np.arange(positions, dtype=np.float64)[:, None] * (frequency / rope.linear_factor)
    return (rope.amplitude * np.stack([np.cos(angle), np.sin(angle)], axis=1)).astype(np.float32)


def _llama3(frequency: Floats, scaling: Llama3Scaling) -> Floats:
    turns = scaling.original_context_len * frequency / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clip(0, 1)
    return frequency * (share + (1 - share) / scaling.factor)


def _yarn(frequency: Floats, scaling: YarnScaling, theta: float) -> Floats:
    """The ramp runs over components, from the one that makes `fast_turns` to the one that makes `slow_turns`."""
    count = len(frequency)

    def component(turns: float) -> float:
        return count * math.log(scaling.original_context_len / (turns * 2 * math.pi)) / math.log(theta)

    first, last = component(scaling.fast_turns), component(scaling.slow_turns)
    if scaling.whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    divided = ((np.arange(count) - first) / max(last - first, 0.001)).clip(0, 1)
    return frequency * (1 - divided + divided / scaling.factor)
