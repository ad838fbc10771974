"""Attention and the KV write in every head size, group, page size and KV type, and what they read."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.kv import KVLayout, Thinning
from kernels.protocol import Attention
from kernels.quantised import GREATEST, SCALE_BYTES
from kernels.thinning import chosen
from kernels.triton import configs
from kernels.triton.attention import split_tokens
from kernels.triton.checks import interpreter
from kernels.triton.checks.sanitizer import sanitized
from kernels.triton.kernels import TritonKernels
from tests.unit.kernels.test_attention import Ragged, attend, written
from tests.unit.kernels.test_thinning import thinned

interpreter.install()

BF16, FP16, FP32, INT8, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn
REQUESTS = [(1, 1), (1, 300), (5, 21), (23, 40), (1, 33)]
TOLERANCE = {FP32: 1e-5, FP16: 3e-3, BF16: 2e-2}
SHAPES = [
    # heads, key heads, head size, page size, activations, KV
    (2, 2, 64, 16, BF16, INT8),
    (4, 2, 64, 32, FP16, FP8),
    (3, 1, 64, 64, FP32, FP32),
    (7, 1, 64, 16, BF16, BF16),
    (8, 1, 64, 32, FP16, INT8),
    (2, 2, 80, 16, FP16, FP16),
    (4, 1, 80, 32, BF16, INT8),
    (6, 2, 80, 64, BF16, FP8),
    (2, 2, 96, 32, BF16, BF16),
    (5, 1, 96, 16, FP16, FP8),
    (6, 1, 96, 64, FP32, INT8),
    (4, 1, 128, 16, BF16, FP8),
    (14, 2, 128, 16, FP16, FP16),
    (8, 1, 128, 64, BF16, INT8),
    (3, 3, 128, 32, FP32, FP8),
    (2, 1, 256, 16, BF16, BF16),
    (4, 2, 256, 32, FP32, FP32),
    (8, 1, 256, 64, BF16, INT8),
]


def batch_of(shape: tuple[int, int, int, int, torch.dtype, torch.dtype]) -> Ragged:
    """A ragged batch whose pages hold the KV type, and whose keys and values are those that they will hold."""
    heads, kv_heads, size, page_size, dtype, kv_dtype = shape
    batch = Ragged(REQUESTS, heads, kv_heads, size, page_size, dtype)
    if kv_dtype in GREATEST:
        batch.layout = KVLayout(2, kv_heads, size, 1, page_size, SCALE_BYTES)
    return batch


def as_stored(x: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """What is left of keys or values [tokens, G, D] in pages of that type."""
    if kv_dtype not in GREATEST:
        return x
    scale = x.float().abs().amax(-1, keepdim=True) / GREATEST[kv_dtype]
    scaled = x.float() / scale.clamp(min=1e-30)
    rounded = (scaled + 0.5).floor() if kv_dtype == INT8 else scaled.to(kv_dtype).float()
    return rounded * scale


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_equals_the_formula_on_what_the_pages_hold(
    shape: tuple[int, int, int, int, torch.dtype, torch.dtype],
) -> None:
    dtype, kv_dtype = shape[4:]
    kernels, batch = TritonKernels("sm_90", kv_dtype), batch_of(shape)
    with sanitized():
        got = attend(kernels, batch, written(kernels, batch, stale=0xFF), batch.plain)
    exact = batch.expected(batch.plain)
    batch.keys, batch.values = ([as_stored(x, kv_dtype) for x in part] for part in (batch.keys, batch.values))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), batch.expected(batch.plain), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if kv_dtype in GREATEST:
        assert (got.double() - exact).norm() / exact.norm() < (0.02 if kv_dtype == INT8 else 0.06)


@pytest.mark.parametrize("kv_dtype", [INT8, FP8], ids=str)
def test_a_context_is_thinned_with_its_scales(kv_dtype: torch.dtype) -> None:
    kernels, batch = TritonKernels("sm_90", kv_dtype), batch_of((4, 2, 64, 16, FP32, kv_dtype))
    storage = torch.full((2 * batch.layout.extent_bytes,), 0xFF, dtype=torch.uint8)
    batch.keys, batch.values = ([as_stored(x, kv_dtype) for x in part] for part in (batch.keys, batch.values))
    work = Thinning(batch.tables[1], tokens=300, kept=141, first=4, last=64)
    with sanitized():
        kv = written(kernels, batch, storage=storage)
        kernels.thin(kernels.kv_views(storage, batch.layout, FP32), batch.layout, work)
        thinned(batch, 1, chosen(batch.keys[1], work))
        got = attend(kernels, batch, kv, batch.plain)
    torch.testing.assert_close(got.double(), batch.expected(batch.plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100", "gfx942"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_the_blocks_of_every_architecture_give_the_same(architecture: configs.Architecture, dtype: torch.dtype) -> None:
    variant = Attention(0.2, window=37, soft_cap=3.0, sinks=torch.tensor([0.5, -1.0, 2.0, 9.0]))
    batch = batch_of((4, 2, 64, 16, dtype, dtype))
    kernels = TritonKernels(architecture)
    with sanitized():
        got = attend(kernels, batch, written(kernels, batch), variant)
    torch.testing.assert_close(got.double(), batch.expected(variant), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_decode_reads_each_key_and_value_once() -> None:
    batch = Ragged([(1, 512), (1, 96), (1, 33)], 4, 1, 128, 16, BF16)
    kernels = TritonKernels("sm_90")
    kv = written(kernels, batch)
    with sanitized() as report:
        attend(kernels, batch, kv, batch.plain)
    kv_bytes = sum(context for _, context in batch.requests) * 2 * 128 * 2
    splits = sum(-(-context // configs.SPLIT_TOKENS) for _, context in batch.requests)
    partial_bytes = splits * 4 * (128 + 2) * 4
    assert kv_bytes + partial_bytes < report.loaded_bytes < 1.03 * (kv_bytes + partial_bytes)
    assert report.distinct_loaded_bytes <= report.loaded_bytes


def test_a_window_is_all_that_decode_reads() -> None:
    batch = Ragged([(1, 1000), (1, 700)], 4, 1, 128, 16, BF16)
    kernels = TritonKernels("sm_90")
    kv = written(kernels, batch)
    with sanitized() as report:
        attend(kernels, batch, kv, Attention(0.1, window=64))
    assert report.loaded_bytes < 1.5 * 2 * 64 * 2 * 128 * 2


def test_a_row_is_the_same_whatever_its_neighbours_are() -> None:
    """A split is so many tokens, and not a share of the longest context: vLLM issue 51226."""
    batch = Ragged([(1, 300), (1, 777), (9, 60)], 4, 2, 64, 16, BF16)
    kernels = TritonKernels("sm_90")
    kv = written(kernels, batch)
    together = attend(kernels, batch, kv, batch.plain)
    alone = Ragged([(1, 300)], 4, 2, 64, 16, BF16)
    alone.tables, alone.q = batch.tables[:1], batch.q[:1]
    assert torch.equal(attend(kernels, alone, kv, batch.plain)[0], together[0])


def test_splits_grow_when_their_results_would_take_too_much_memory() -> None:
    assert split_tokens(64, 32, 128, 4096) == configs.SPLIT_TOKENS
    tokens = split_tokens(256, 64, 128, 131072)
    assert tokens > configs.SPLIT_TOKENS
    assert 4 * 256 * 64 * 128 * math.ceil(131072 / tokens) <= 2**28


def test_empty_rows_of_a_padded_batch_are_passed_over() -> None:
    """A batch of fixed shape has requests without rows at its end."""
    batch = batch_of((4, 2, 64, 16, BF16, BF16))
    kernels = TritonKernels("sm_90")
    kv = written(kernels, batch)
    meta = batch.metadata([rows for rows, _ in batch.requests])
    padded = replace(
        meta,
        query_start=torch.cat([meta.query_start, meta.query_start[-1:].repeat(2)]),
        context_len=torch.cat([meta.context_len, torch.zeros(2, dtype=torch.int32)]),
        block_table=torch.nn.functional.pad(meta.block_table, (0, 0, 0, 2)),
    )
    with sanitized():
        got = kernels.paged_attention(batch.q, kv, kernels.prepare(padded, BF16), batch.plain)
    torch.testing.assert_close(got.double(), batch.expected(batch.plain), rtol=2e-2, atol=2e-2)
