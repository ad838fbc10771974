"""The engine's frozen configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from engine.compression import KVCompression

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4", "gguf"]
KVDtype = Literal["auto", "int8", "fp8"]
DTYPES: tuple[str, ...] = get_args(Dtype)
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)
KV_DTYPES: tuple[str, ...] = get_args(KVDtype)
KernelChoice = Literal["auto", "torch", "triton"]
KERNELS: tuple[str, ...] = get_args(KernelChoice)
MOST_THREADS = 1024
"""More than any machine's cores; a system that can't start so many would end the process."""
MOST_RANKS = 64
"""Devices that one machine may have."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to load and how much to run at once. Nobody assigns to it after construction."""

    model: str
    """A catalogue name, a Hugging Face directory, a GGUF file, a hub id, or `fake`."""
    cache: Path | None = None
    """Where models are kept; by default `$XDG_CACHE_HOME/headrace`."""
    dtype: Dtype = "auto"
    """`auto`: bfloat16 where the device has instructions for it, else float32."""
    device: str = "auto"
    tensor_parallel_size: int = 1
    """Devices that the model is divided among, each with a process (`engine.parallel`); of a CPU, parts of its cores.

    Memory in bytes, of the KV and the swap space, is of each.
    """
    patience_s: float = 60.0
    """How long one of several processes may keep the others waiting within a step before it is taken to be lost."""
    max_num_seqs: int = 64
    max_seq_len: int = 4096
    max_num_batched_tokens: int = 1024
    page_size: int = 16
    kv_cache_dtype: KVDtype = "auto"
    """What keys and values are kept as: `auto` in `dtype`; `int8` and `fp8` (e4m3) in a byte, with scales."""
    kv_compression: KVCompression = KVCompression()  # noqa: RUF009
    """Whether long requests keep a share of their keys and values only."""
    sliding_window: int | None = None
    """Most tokens that a token sees of those before it, itself included; None is what the model was made for."""
    kv_cache_bytes: int | None = None
    """Size of the KV pool; by default all that is left on a GPU, and 1 GiB on a CPU. Never more than is left."""
    gpu_memory_utilization: float = 0.85
    """Share of the device's memory that may be used; on a CPU, of what this process has and could still get."""
    threads: int | None = None
    quantization: Quantization = "none"
    """Of the layers' weights. `none`: in `dtype`; `int8`, `int4`: in so many bits; `gguf`: a GGUF file's own blocks.

    The CPU library has activations in 8 bits with them, and no `int4`."""
    kernels: KernelChoice = "auto"
    """Whose operations torch's models are computed with: `auto` is Triton on a GPU that it runs on, else `torch`."""
    embeddings: bool = False
    """Whether texts can be made into vectors too, which takes torch on a CPU."""
    enable_prefix_caching: bool = True
    swap_space_bytes: int = 256 * 2**20
    """Host memory for the KV of preempted requests; 0 always computes it again."""
    batch_window_ms: float = 0.0
    """How long a new request may wait for companions while the engine is busy; an idle engine starts at once."""
    prefill_share: float = 0.25
    """Share of `max_num_batched_tokens` that prompts may take of a step in which others decode; 1 is no cap."""
    num_speculative_tokens: int = 4
    """Most tokens that are guessed ahead for a request (`engine.speculation`), where that pays; 0 guesses none."""
    speculative_model: str | None = None
    """A smaller model of the same vocabulary that guesses where prompt lookup has nothing, where that pays."""
    aging_s: float = 60.0
    """A waiting request rises by one class of priority each time it has waited for this long."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of the tokens when several tenants wait; 1 for those not named."""
    enforce_eager: bool = False
    """Whether a GPU gets each operation of a step by itself; else steps of one token a request are recorded once."""
    overlap: bool | Literal["auto"] = "auto"
    """Whether the next step is planned while the device computes: `auto` is yes where the device is not the host."""
    ops: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Operations in the place of built-in ones, by their names (`engine.model.ops.REPLACEABLE`); torch runs them."""
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    """Low-rank adapters that requests may name, and their directories (PEFT's: a configuration and safetensors)."""
    warm_up: bool = True
    """Whether the memory budget is verified by a small step before the first request."""
    memory_margin: float = 0.2
    """Share of the memory left after the weights that admission keeps free."""

    def __post_init__(self) -> None:
        for name, known in (
            ("dtype", DTYPES), ("quantization", QUANTIZATIONS), ("kv_cache_dtype", KV_DTYPES), ("kernels", KERNELS)
        ):  # fmt: skip
            self._require(name, getattr(self, name) in known, f"one of {', '.join(known)}")
        self._require("overlap", isinstance(self.overlap, bool) or self.overlap == "auto", "True, False or 'auto'")
        for name in ("tensor_parallel_size", "max_num_seqs", "max_seq_len", "max_num_batched_tokens", "page_size"):
            self._whole(name, 1)
        for name in ("swap_space_bytes", "num_speculative_tokens"):
            self._whole(name, 0)
        if self.sliding_window is not None:
            self._whole("sliding_window", 1)
        if self.kv_cache_bytes is not None:
            self._whole("kv_cache_bytes", 0)
        if self.threads is not None:
            self._whole("threads", 1)
            self._require("threads", self.threads <= MOST_THREADS, f"at most {MOST_THREADS}")
        for name in ("prefill_share", "gpu_memory_utilization"):
            self._require(name, 0 < getattr(self, name) <= 1, "over 0 and at most 1")
        if self.speculative_model is not None:
            self._check_speculative()
        self._require("tensor_parallel_size", self.tensor_parallel_size <= MOST_RANKS, f"at most {MOST_RANKS}")
        self._require("patience_s", 0 < self.patience_s < math.inf, "a number over 0")
        self._require("batch_window_ms", 0 <= self.batch_window_ms < math.inf, "a number, at least 0")
        self._require("memory_margin", 0 <= self.memory_margin < 1, "from 0 to under 1")
        self._require("aging_s", 0 < self.aging_s < math.inf, "a number over 0")
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of tenant {tenant!r} must be a number over 0, got {weight}")

        if not all(isinstance(name, str) and name.strip() for name in self.adapters):
            raise ValueError(f"adapters have names that are not empty, got {list(self.adapters)}")

    def _check_speculative(self) -> None:
        """What a draft model can't be had with."""
        for name, has in (
            ("num_speculative_tokens=0", self.num_speculative_tokens == 0),
            ("overlap=True", self.overlap is True),
            ("tensor_parallel_size over 1", self.tensor_parallel_size > 1),
            ("kv_compression.ratio under 1", self.kv_compression.thins),
        ):
            if has:
                raise ValueError(f"speculative_model can't be had with {name}")

    def _whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        holds = isinstance(value, int) and not isinstance(value, bool) and value >= least
        self._require(name, holds, f"a whole number, at least {least}")

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"{name} must be {what}, got {getattr(self, name)!r}")
