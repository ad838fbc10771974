"""The engine's frozen configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to load and how much to run at once. Nobody assigns to it after construction."""

    model: str
    """A catalogue name, a Hugging Face directory, a GGUF file, a hub id, or `fake`."""
    cache: Path | None = None
    """Where models are kept; by default `$XDG_CACHE_HOME/headrace`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: bfloat16 where the device has instructions for it, else float32."""
    device: str = "auto"
    max_num_seqs: int = 64
    max_seq_len: int = 4096
    max_num_batched_tokens: int = 1024
    page_size: int = 16
    sliding_window: int | None = None
    """Most tokens that a token sees of those before it, itself included; None is what the model was made for."""
    kv_cache_bytes: int | None = None
    """Size of the KV pool; by default all that is left on a GPU, and 1 GiB on a CPU. Never more than is left."""
    gpu_memory_utilization: float = 0.85
    """Share of the device's memory that may be used; on a CPU, of what this process has and could still get."""
    threads: int | None = None
    quantization: Literal["none", "int8", "gguf"] = "none"
    """`none`: weights in `dtype`; `int8`: 8-bit weights and activations; `gguf`: a GGUF file's blocks as they are."""
    enable_prefix_caching: bool = True
    swap_space_bytes: int = 256 * 2**20
    """Host memory for the KV of preempted requests; 0 always computes it again."""
    batch_window_ms: float = 0.0
    """How long a new request may wait for companions while the engine is busy; an idle engine starts at once."""
    prefill_share: float = 0.25
    """Share of `max_num_batched_tokens` that prompts may take of a step in which others decode; 1 is no cap."""
    num_speculative_tokens: int = 4
    """Most tokens that are guessed ahead for a request (`engine.speculation`), where that pays; 0 guesses none."""
    aging_s: float = 60.0
    """A waiting request rises by one class of priority each time it has waited for this long."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of the tokens when several tenants wait; 1 for those not named."""
    warm_up: bool = True
    """Whether the memory budget is verified by a small step before the first request."""
    memory_margin: float = 0.2
    """Share of the memory left after the weights that admission keeps free."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_seq_len", "max_num_batched_tokens", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, got {self.sliding_window}")
        for name in ("swap_space_bytes", "batch_window_ms", "num_speculative_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("prefill_share", "gpu_memory_utilization"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be over 0 and at most 1, got {getattr(self, name)}")
        if not 0 <= self.memory_margin < 1:
            raise ValueError(f"memory_margin must be from 0 to under 1, got {self.memory_margin}")
        if self.aging_s <= 0:
            raise ValueError(f"aging_s must be over 0, got {self.aging_s}")
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of tenant {tenant!r} must be a number over 0, got {weight}")
