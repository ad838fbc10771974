"""Paged attention against softmax(QK^T)V written out for each row, on ragged batches."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kernels.kv import KVLayout
from kernels.protocol import Attention, AttentionMetadata, Kernels
from kernels.reference_attention import GROUP_COST_TOKENS, group_by_context

EXTENTS = 2
"""Pages are scattered over so many."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

MIXED = [(1, 1), (7, 7), (1, 35), (5, 20), (1, 16), (16, 16), (2, 33), (1, 300), (1, 17)]
"""(rows, context) of each request: decodes, whole prompts, later chunks; contexts on, before and behind page ends."""


@dataclass
class Ragged:
    """A batch whose pages are scattered over the pool, and its keys and values in the order of their tokens."""

    requests: list[tuple[int, int]]
    heads: int
    kv_heads: int
    size: int
    page_size: int
    dtype: torch.dtype
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        needed = [-(-context // self.page_size) for _, context in self.requests]
        self.layout = KVLayout(2, self.kv_heads, self.size, self.dtype.itemsize, self.page_size)
        free = random.Random(7).sample(range(EXTENTS * self.layout.pages_per_extent), sum(needed))
        for (_, context), count in zip(self.requests, needed, strict=True):
            shape = (context, self.kv_heads, self.size)
            self.keys.append(torch.randn(shape, generator=generator).to(self.dtype))
            self.values.append(torch.randn(shape, generator=generator).to(self.dtype))
            self.tables.append([free.pop() for _ in range(count)])
        rows = sum(rows for rows, _ in self.requests)
        self.q = torch.randn(rows, self.heads, self.size, generator=generator).to(self.dtype)
        self.plain = Attention(scale=1 / math.sqrt(self.size))

    def metadata(self, rows: list[int]) -> AttentionMetadata:
        """The last `rows[r]` tokens of each request."""
        spans = [range(context - n, context) for n, (_, context) in zip(rows, self.requests, strict=True)]
        slots = [
            table[p // self.page_size] * self.page_size + p % self.page_size
            for span, table in zip(spans, self.tables, strict=True)
            for p in span
        ]
        starts = [0]
        for n in rows:
            starts.append(starts[-1] + n)
        width = max(map(len, self.tables))

        def i32(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        return AttentionMetadata(
            positions=i32([p for span in spans for p in span]),
            slots=i32(slots),
            query_start=i32(starts),
            context_len=i32([context for _, context in self.requests]),
            block_table=i32([table + [0] * (width - len(table)) for table in self.tables]),
            max_query=max(rows),
            max_context=max(context for _, context in self.requests),
            layout=self.layout,
        )

    def expected(self, attention: Attention) -> Tensor:
        out, start = [], 0
        shared = self.heads // self.kv_heads
        for (rows, context), keys, values in zip(self.requests, self.keys, self.values, strict=True):
            for row in range(rows):
                end = context - rows + row + 1
                first = 0 if attention.window is None else max(0, end - attention.window)
                for head in range(self.heads):
                    k, v = keys[first:end, head // shared].double(), values[first:end, head // shared].double()
                    score = k @ self.q[start + row, head].double() * attention.scale
                    if attention.soft_cap is not None:
                        score = (score / attention.soft_cap).tanh() * attention.soft_cap
                    weight = score.exp()
                    sink = 0 if attention.sinks is None else attention.sinks[head].double().exp()
                    out.append(weight @ v / (weight.sum() + sink))
            start += rows
        return torch.stack(out).view_as(self.q)


def attend(kernels: Kernels, batch: Ragged, kv: object, attention: Attention) -> Tensor:
    meta = kernels.prepare(batch.metadata([rows for rows, _ in batch.requests]), batch.dtype)
    return kernels.paged_attention(batch.q, kv, meta, attention)


def written(kernels: Kernels, batch: Ragged, stale: int = 0, storage: Tensor | None = None) -> object:
    """A pool of `stale` bytes with each request's whole context, written by the implementation without turning it."""
    if storage is None:
        storage = torch.full((EXTENTS * batch.layout.extent_bytes,), stale, dtype=torch.uint8)
    kv = kernels.kv_views(storage, batch.layout, batch.dtype)[1]
    contexts = [context for _, context in batch.requests]
    still = torch.stack([torch.ones(max(contexts), batch.size // 2), torch.zeros(max(contexts), batch.size // 2)], 1)
    keys, values = torch.cat(batch.keys), torch.cat(batch.values)
    queries = torch.zeros(len(keys), batch.heads, batch.size, dtype=batch.dtype)
    meta = kernels.prepare(batch.metadata(contexts), batch.dtype)
    kernels.rotary_kv_write(torch.cat([queries, keys, values], dim=1), still, meta, kv)
    return kv


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (4, 1)])
@pytest.mark.parametrize("size", [64, 80, 96, 128])
def test_mixed_batch_equals_the_formula(kernels: Kernels, size: int, heads: int, kv_heads: int, page_size: int) -> None:
    if kernels.name == "cpu" and page_size % 16:
        pytest.skip("pages of the CPU library hold a multiple of 16 tokens")
    batch = Ragged(MIXED, heads, kv_heads, size, page_size, torch.float32)
    got = attend(kernels, batch, written(kernels, batch), batch.plain)
    torch.testing.assert_close(got.double(), batch.expected(batch.plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "requests", [MIXED, [(1, 50)] * 3, [(9, 9)], [(1, 1)]], ids=["mixed", "equal", "prompt", "one"]
)
def test_bfloat16(kernels: Kernels, requests: list[tuple[int, int]]) -> None:
    batch = Ragged(requests, 9, 3, 64, 16, torch.bfloat16)
    got = attend(kernels, batch, written(kernels, batch), batch.plain)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), batch.expected(batch.plain), rtol=2e-2, atol=2e-2)


def test_memory_behind_the_context_is_never_read(kernels: Kernels) -> None:
    """Pages come from requests that have ended; whatever those left there, NaN (all bits set) too, must not leak."""
    batch = Ragged(MIXED, 4, 2, 64, 16, torch.float32)
    kv = written(kernels, batch, stale=0xFF)
    got = attend(kernels, batch, kv, batch.plain)
    torch.testing.assert_close(got.double(), batch.expected(batch.plain), rtol=1e-5, atol=1e-5)


def test_an_extreme_score_does_not_overflow(kernels: Kernels) -> None:
    batch = Ragged([(1, 40), (3, 12)], 2, 1, 64, 16, torch.float32)
    batch.keys = [keys * 100 for keys in batch.keys]
    got = attend(kernels, batch, written(kernels, batch), batch.plain)
    assert torch.isfinite(got).all()
    best = int((batch.keys[0][:, 0] @ batch.q[0, 0]).argmax())
    torch.testing.assert_close(got[0, 0], batch.values[0][best, 0], rtol=1e-3, atol=1e-3)


SINKS = torch.tensor([-1.0, 0.5, 3.0, 40.0])
VARIANTS = {
    "window": Attention(0.2, window=17),
    "window of a page": Attention(0.2, window=16),
    "window of one": Attention(0.2, window=1),
    "wide window": Attention(0.2, window=1000),
    "soft cap": Attention(0.6, soft_cap=2.0),
    "sinks": Attention(0.2, sinks=SINKS),
    "all": Attention(0.6, window=9, soft_cap=3.0, sinks=SINKS),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_variants_equal_the_formula(kernels: Kernels, variant: Attention, dtype: torch.dtype) -> None:
    batch = Ragged([*MIXED, (60, 90), (12, 12)], 4, 2, 64, 16, dtype)
    if kernels.name == "cpu" and (variant.soft_cap is not None or variant.sinks is not None):
        with pytest.raises(NotImplementedError, match="neither soft caps nor sinks"):
            attend(kernels, batch, written(kernels, batch), variant)
        return
    got = attend(kernels, batch, written(kernels, batch), variant)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), batch.expected(variant), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_long_prompt_with_a_soft_cap_is_attended_in_parts(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels.name != "reference":
        pytest.skip("of the reference alone")
    monkeypatch.setattr("kernels.reference_attention.MOST_SCORES", 4 * 90 * 7)
    batch = Ragged([(60, 60), (60, 90), (1, 90)], 4, 2, 64, 16, torch.float32)
    for variant in (VARIANTS["soft cap"], VARIANTS["all"]):
        got = attend(kernels, batch, written(kernels, batch), variant)
        torch.testing.assert_close(got.double(), batch.expected(variant), rtol=1e-5, atol=1e-5)


def test_layers_of_different_windows_share_a_step(kernels: Kernels) -> None:
    batch = Ragged(MIXED, 4, 2, 64, 16, torch.float32)
    kv = written(kernels, batch)
    meta = kernels.prepare(batch.metadata([rows for rows, _ in batch.requests]), batch.dtype)
    for window in (5, None, 30, 5):
        variant = Attention(0.2, window=window)
        got = kernels.paged_attention(batch.q, kv, meta, variant)
        torch.testing.assert_close(got.double(), batch.expected(variant), rtol=1e-5, atol=1e-5)


def test_pages_behind_the_window_are_never_read(kernels: Kernels) -> None:
    """They may have been given back: their places in the block table lead to somebody else's page."""
    batch = Ragged([(1, 300), (4, 100), (1, 40), (1, 16)], 4, 2, 64, 16, torch.float32)
    kv = written(kernels, batch)
    variant = Attention(0.2, window=20)
    expected = batch.expected(variant)
    stranger = batch.tables[3][0]
    kept = [(context - rows - 19) // batch.page_size for rows, context in batch.requests]
    batch.tables = [[stranger] * max(0, n) + table[max(0, n) :] for n, table in zip(kept, batch.tables, strict=True)]
    torch.testing.assert_close(attend(kernels, batch, kv, variant).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("field", "value"), [("window", 0), ("soft_cap", 0.0), ("soft_cap", -1.0)])
def test_senseless_variants_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=str(value)):
        Attention(1.0, **{field: value})


class TestGrouping:
    def test_every_request_is_in_one_group_and_padding_is_bounded(self) -> None:
        random_lengths = random.Random(5)
        lengths = [random_lengths.randint(1, 4000) for _ in range(64)]
        groups = group_by_context(range(64), lengths)
        assert sorted(request for group in groups for request in group) == list(range(64))
        for group in groups:
            longest = max(lengths[request] for request in group)
            assert lengths[group[0]] == longest
            assert sum(longest - lengths[request] for request in group) <= GROUP_COST_TOKENS

    def test_equal_contexts_are_one_group(self) -> None:
        assert group_by_context([4, 2, 9], [7] * 10) == [[4, 2, 9]]

    def test_no_requests_no_groups(self) -> None:
        assert group_by_context([], []) == []
