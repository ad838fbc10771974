"""The engine's frozen configuration."""

from __future__ import annotations

from dataclasses import dataclass
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
    kv_cache_bytes: int | None = None
    """Size of the KV pool; by default what `gpu_memory_utilization` leaves on a GPU, and 1 GiB on a CPU."""
    gpu_memory_utilization: float = 0.85
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_seq_len", "max_num_batched_tokens", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
