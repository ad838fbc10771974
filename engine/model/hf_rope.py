"""Rotary positions in a Hugging Face configuration, old and new. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.model.spec import ForeignModel, Llama3Scaling, LongRopeScaling, RopeSpec, UnsupportedModel, YarnScaling

Config = Mapping[str, Any]


def read_rope(config: Config, head_size: int, *, may_be_partial: bool = False) -> RopeSpec:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before it).

    `may_be_partial`: whether heads may be turned in part without any scaling; most families' code turns all of them.
    """
    rope = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    rope |= config.get("rope_parameters") or {}
    for name in ("partial_rotary_factor", "original_max_position_embeddings", "max_position_embeddings"):
        rope.setdefault(name, config.get(name))
    if not may_be_partial and _kind(rope) == "default":
        rope["partial_rotary_factor"] = None
    return rope_of(rope, head_size)


def read_local_rope(config: Config, head_size: int) -> tuple[RopeSpec, RopeSpec]:
    """Those of global and of local layers, as Gemma 3 has them."""
    both = config.get("rope_parameters") or {
        "full_attention": {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})},
        "sliding_attention": {"rope_theta": config.get("rope_local_base_freq")},
    }
    wide = {"rope_theta": 1_000_000.0} | _told(both.get("full_attention"))
    local = {"rope_theta": 10_000.0} | _told(both.get("sliding_attention"))
    return rope_of(wide, head_size), rope_of(local, head_size)


def rope_of(rope: Config, head_size: int) -> RopeSpec:
    """Rotary positions from their own parameters; those of the model are among them where they are needed."""
    kind = _kind(rope)
    theta = float(rope.get("rope_theta") or 10000.0)
    share = float(rope.get("partial_rotary_factor") or 1.0)
    rotated = None if share == 1.0 else int(head_size * share)
    if kind == "default":
        return RopeSpec(theta, rotated=rotated)
    if kind == "linear":
        return RopeSpec(theta, linear_factor=float(rope["factor"]), rotated=rotated)
    if kind == "llama3":
        return RopeSpec(theta, scaling=_llama3(rope), rotated=rotated)
    if kind == "yarn":
        return _yarn(theta, rope, rotated)
    if kind in ("longrope", "su"):
        return _longrope(theta, rope, rotated, head_size)
    raise ForeignModel(
        f"rope scaling of type {kind!r} is not supported; supported are linear, llama3, yarn and longrope"
    )


def _kind(rope: Config) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _llama3(rope: Config) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context_len=int(rope["original_max_position_embeddings"]),
    )


def _yarn(theta: float, rope: Config, rotated: int | None) -> RopeSpec:
    original = int(rope.get("original_max_position_embeddings") or rope["max_position_embeddings"])
    factor = float(rope.get("factor") or rope["max_position_embeddings"] / original)
    scaling = YarnScaling(
        factor,
        original,
        fast_turns=float(rope.get("beta_fast") or 32),
        slow_turns=float(rope.get("beta_slow") or 1),
        whole=bool(rope.get("truncate", True)),
    )
    amplitude = rope.get("attention_factor")
    if amplitude is None:
        scales = rope.get("mscale"), rope.get("mscale_all_dim")
        amplitude = _mscale(factor, 1.0)
        if all(scales):
            amplitude = _mscale(factor, float(scales[0] or 0)) / _mscale(factor, float(scales[1] or 0))
    return RopeSpec(theta, scaling=scaling, amplitude=float(amplitude), rotated=rotated)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(theta: float, rope: Config, rotated: int | None, head_size: int) -> RopeSpec:
    original = int(rope.get("original_max_position_embeddings") or rope["max_position_embeddings"])
    factor = float(rope.get("factor") or rope["max_position_embeddings"] / original)
    amplitude = rope.get("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (tuple(map(float, rope[f"{name}_factor"])) for name in ("short", "long"))
    wanted = (rotated or head_size) // 2
    if len(short) != wanted or len(long) != wanted:
        raise UnsupportedModel(f"longrope lists {len(short)} and {len(long)} factors for {wanted} frequencies")
    return RopeSpec(theta, scaling=LongRopeScaling(short, long, original), amplitude=float(amplitude), rotated=rotated)


def _told(rope: Config | None) -> dict[str, Any]:
    """What isn't null."""
    return {name: value for name, value in (rope or {}).items() if value is not None}
