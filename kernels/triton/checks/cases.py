"""Launches of every kernel in the shapes of real models, on meta tensors: what the offline check compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.adapters import AdapterRows, Adapters
from kernels.kv import KVLayout
from kernels.protocol import Attention, AttentionMetadata
from kernels.quantised import scale_bytes
from kernels.sampling import SamplingBatch
from kernels.triton import sampling
from kernels.triton.configs import Architecture
from kernels.triton.kernels import TritonKernels
from kernels.triton.linear import QuantisedLinear
from kernels.triton.lora import add_adapters
from kernels.weights import GROUP, Bits, QuantisedWeight

BF16, FP16, FP32, INT8, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn
UINT8 = torch.uint8
ARENA_BYTES = 2**36
"""As much as a large GPU has: addresses in it don't fit into 32 bits."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    run: Callable[[Architecture], None]
    lacking: tuple[Architecture, ...] = ()
    """Architectures that can't have it."""


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's attention."""

    heads: int
    kv_heads: int
    size: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    norm: bool = False
    rotated: int | None = None
    """Components of a head that are rotated; None for all."""


ATTENTIONS = {
    "SmolLM2-135M": Heads(9, 3, 64, 16, BF16, BF16),
    "gpt-oss": Heads(64, 8, 64, 16, BF16, BF16, window=128, sinks=True),
    "Phi-2": Heads(32, 32, 80, 16, FP16, FP16, rotated=32),
    "Phi-3-mini": Heads(32, 32, 96, 32, BF16, BF16, window=2047),
    "Llama-3-8B": Heads(32, 8, 128, 16, BF16, BF16),
    "Qwen2.5-7B": Heads(28, 4, 128, 64, BF16, BF16),
    "Qwen3-0.6B": Heads(16, 8, 128, 16, BF16, BF16, norm=True),
    "Gemma-2-2B": Heads(8, 4, 256, 16, BF16, BF16, window=4096, soft_cap=50.0),
    "Llama-3-8B int8 KV": Heads(32, 8, 128, 16, BF16, INT8),
    "Llama-3-8B fp8 KV": Heads(32, 8, 128, 32, BF16, FP8),
    "Gemma-3-1B int8 KV": Heads(4, 1, 256, 16, BF16, INT8, window=512, norm=True),
    "Llama-3-8B float32": Heads(32, 8, 128, 16, FP32, FP32),
}


@dataclass(frozen=True, slots=True)
class Weights:
    """A form of quantised weights."""

    bits: Bits
    group: int = GROUP
    scale_dtype: torch.dtype = FP32
    minimums: bool = False


WEIGHTS = {
    "int8": Weights(8),
    "int4": Weights(4),
    "Q8_0": Weights(8, 32, FP16),
    "Q4_0": Weights(4, 32, FP16),
    "Q4_1": Weights(4, 32, FP16, minimums=True),
    "Q4_K": Weights(4, 32, FP32, minimums=True),
}


def cases() -> Iterator[Case]:
    """All that the check compiles."""
    for name, heads in ATTENTIONS.items():
        lacking: tuple[Architecture, ...] = ("sm_80",) if heads.kv_dtype == FP8 else ()
        yield Case(name, lambda architecture, heads=heads: _attend(architecture, heads), lacking)  # type: ignore[misc]
    for hidden in (576, 4096):
        yield Case(f"rows of {hidden}", lambda _, hidden=hidden: _rows(hidden))  # type: ignore[misc]
    for name, weights in WEIGHTS.items():
        for rows in (16, 64, 512):
            yield Case(
                f"{name} weights, {rows} rows",
                lambda architecture, weights=weights, rows=rows: _multiply(architecture, weights, rows),  # type: ignore[misc]
            )
    yield Case("adapters of rank 16", _adapt)
    yield Case("sampling of 151936", lambda _: _sample())
    yield Case("page copy", lambda _: _copy())


def meta_tensor(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def i32(*shape: int) -> Tensor:
    return meta_tensor(*shape, dtype=torch.int32)


def _layout(heads: Heads) -> KVLayout:
    kind = heads.kv_dtype
    return KVLayout(28, heads.kv_heads, heads.size, kind.itemsize, heads.page_size, scale_bytes(kind))


def _arena(layout: KVLayout) -> Tensor:
    return meta_tensor(ARENA_BYTES // layout.extent_bytes * layout.extent_bytes, dtype=torch.uint8)


def _attend(architecture: Architecture, heads: Heads) -> None:
    """A step of 32 requests with 4,096 tokens each, of which some are prompts: rotation, write and attention."""
    kernels, layout = TritonKernels(architecture, heads.kv_dtype), _layout(heads)
    kv = kernels.kv_views(_arena(layout), layout, heads.dtype)[1]
    meta = kernels.prepare(
        AttentionMetadata(
            i32(512), i32(512), i32(33), i32(32), i32(32, 4096 // layout.page_size), 256, 4096, layout
        ),
        heads.dtype,
    )  # fmt: skip
    rotated = heads.size if heads.rotated is None else heads.rotated
    norm = meta_tensor(heads.size, dtype=FP32) if heads.norm else None
    qkv = meta_tensor(512, heads.heads + 2 * heads.kv_heads, heads.size, dtype=heads.dtype)
    q = kernels.rotary_kv_write(qkv, meta_tensor(4096, 2, rotated // 2, dtype=FP32), meta, kv, norm, norm)
    sinks = meta_tensor(heads.heads, dtype=FP32) if heads.sinks else None
    kernels.paged_attention(q, kv, meta, Attention(0.1, heads.window, heads.soft_cap, sinks))


def _rows(hidden: int) -> None:
    kernels = TritonKernels("sm_90")
    x, weight = meta_tensor(512, hidden), meta_tensor(hidden, dtype=FP32)
    kernels.rms_norm(x.float(), weight, 1e-6, BF16)
    kernels.add_rms_norm(x.float(), x, weight, 1e-6, BF16)
    kernels.silu_and_mul(meta_tensor(512, 6 * hidden))
    kernels.gelu_and_mul(meta_tensor(512, 6 * hidden))


def _multiply(architecture: Architecture, weights: Weights, rows: int) -> None:
    size, groups = 4096, 4096 // weights.group
    numbers = meta_tensor(size, size, dtype=INT8) if weights.bits == 8 else meta_tensor(size, size // 2, dtype=UINT8)
    scales, minimums = (meta_tensor(size, groups, dtype=weights.scale_dtype) for _ in range(2))
    weight = QuantisedWeight(weights.bits, numbers, scales, minimums if weights.minimums else None)
    QuantisedLinear(architecture, weight)(meta_tensor(rows, size))


def _adapt(architecture: Architecture) -> None:
    adapters = Adapters(meta_tensor(8, 3, 16, 4096), meta_tensor(8, 6144, 16), i32(4), (4096, 1024, 1024))
    rows = AdapterRows(i32(512), i32(9))
    add_adapters(meta_tensor(512, 4096), meta_tensor(512, 6144), rows, adapters, architecture)


def _sample() -> None:
    batch = SamplingBatch((1.0,) * 16, (0,) * 16, (0.9,) * 16, (0.0,) * 16, (0,) * 16, (0,) * 16, ((),) * 16)
    sampling.choose(meta_tensor(16, 151936, dtype=FP32), batch)


def _copy() -> None:
    layout = _layout(ATTENTIONS["Llama-3-8B"])
    TritonKernels("sm_90").copy_pages(_arena(layout), layout, i32(64), i32(64))
