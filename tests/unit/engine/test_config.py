"""What the engine's configuration refuses, by name, before a model is loaded."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.config import EngineConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "int8"),
        ("quantization", "int3"),
        ("kernels", "cuda"),
        ("quantization", None),
        ("kv_cache_dtype", "fp4"),
        ("max_seq_len", 0),
        ("max_seq_len", 2.5),
        ("max_seq_len", True),
        ("max_num_seqs", "3"),
        ("max_num_batched_tokens", 0),
        ("page_size", -16),
        ("sliding_window", 0),
        ("kv_cache_bytes", -1),
        ("threads", 0),
        ("threads", 10**6),
        ("swap_space_bytes", -1),
        ("num_speculative_tokens", -1),
        ("batch_window_ms", math.nan),
        ("batch_window_ms", math.inf),
        ("prefill_share", 0.0),
        ("gpu_memory_utilization", math.nan),
        ("memory_margin", 1.0),
        ("aging_s", math.nan),
    ],
)
def test_a_value_without_a_meaning_is_refused_by_name(name: str, value: Any) -> None:
    """A misspelt quantization served the model in another form, and said nothing."""
    with pytest.raises(ValueError, match=f"{name} must be"):
        EngineConfig("fake", **{name: value})


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_tenants_weight_is_a_number_over_0(weight: float) -> None:
    with pytest.raises(ValueError, match="'shop' must be a number over 0"):
        EngineConfig("fake", tenant_weights={"shop": weight})


@pytest.mark.parametrize("config", [{"kv_cache_bytes": None, "threads": None}, {"threads": 1024, "prefill_share": 1.0}])
def test_the_ends_of_every_range_are_allowed(config: dict[str, Any]) -> None:
    EngineConfig("fake", swap_space_bytes=0, num_speculative_tokens=0, memory_margin=0.0, **config)
