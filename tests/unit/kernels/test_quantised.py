"""Keys and values in a byte each: what is lost, and attention over what is left."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.kv import KVLayout
from kernels.protocol import Attention
from kernels.quantised import GREATEST, SCALE_BYTES, TYPES, quantise, restore
from kernels.reference import ReferenceKernels
from tests.unit.kernels.conftest import Quantising
from tests.unit.kernels.test_attention import MIXED, TOLERANCE, Ragged, attend, written

KINDS = list(TYPES.values())
MOST_ERROR = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 1 / 16}
"""Of a number: half a step of the greatest one's 127, and half of the last of three bits."""


def quantised_batch(
    kind: torch.dtype, shape: tuple[int, int, int, int] = (9, 3, 64, 16), dtype: torch.dtype = torch.float32
) -> Ragged:
    """A batch whose pages hold bytes; its keys and values are those that they will hold."""
    batch = Ragged(MIXED, *shape, dtype)
    batch.layout = KVLayout(2, shape[1], shape[2], 1, shape[3], SCALE_BYTES)
    return batch


def left_of(x: Tensor, kind: torch.dtype) -> Tensor:
    return restore(*quantise(x, kind))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_number_loses_little(kind: torch.dtype) -> None:
    x = torch.randn(200, 3, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 200)[:, None, None]
    error = (left_of(x, kind) - x).abs()
    reference = x.abs().amax(-1, keepdim=True) if kind == torch.int8 else x.abs() + x.abs().amax(-1, keepdim=True) / 500
    assert (error <= MOST_ERROR[kind] * 1.001 * reference).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_ends_of_a_head_are_kept(kind: torch.dtype) -> None:
    """A head of zeros has no scale, and the greatest number of one is its scale's own."""
    x = torch.tensor([[0.0, 0.0, 0.0, 0.0], [3.0, -3.0, 0.0, 1.5], [1e-30, 0.0, 0.0, 0.0], [1e30, -1e30, 0.0, 0.0]])
    kept = left_of(x, kind)
    torch.testing.assert_close(kept[:, :3], x[:, :3], rtol=1e-5, atol=0)
    assert torch.isfinite(kept).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(9, 3, 64, 16), (4, 1, 80, 4), (2, 2, 6, 1), (7, 1, 96, 32), (4, 2, 128, 16), (2, 1, 256, 48)], ids=str
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_attention_equals_the_formula_on_what_the_pages_hold(
    quantising: Quantising, kind: torch.dtype, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    kernels, batch = quantising(kind), quantised_batch(kind, shape, dtype)
    if kernels.name == "cpu" and shape[3] % 16:
        pytest.skip("pages of the CPU library hold a multiple of 16 tokens")
    got = attend(kernels, batch, written(kernels, batch, stale=0xFF), batch.plain)
    exact = batch.expected(batch.plain)
    batch.keys, batch.values = ([left_of(x, kind) for x in part] for part in (batch.keys, batch.values))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), batch.expected(batch.plain), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert 0 < (got.double() - exact).norm() / exact.norm() < (0.02 if kind == torch.int8 else 0.06)


@pytest.mark.parametrize("window", [1, 9, 16, 200])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_windows_read_the_same_pages(quantising: Quantising, kind: torch.dtype, window: int) -> None:
    kernels, batch = quantising(kind), quantised_batch(kind, (4, 2, 64, 16))
    kv = written(kernels, batch, stale=0xFF)
    batch.keys, batch.values = ([left_of(x, kind) for x in part] for part in (batch.keys, batch.values))
    variant = Attention(0.6, window=window)
    torch.testing.assert_close(
        attend(kernels, batch, kv, variant).double(), batch.expected(variant), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_variants_read_the_same_pages(kind: torch.dtype) -> None:
    kernels, batch = ReferenceKernels(torch.device("cpu"), kind), quantised_batch(kind, (4, 2, 64, 16))
    kv = written(kernels, batch)
    batch.keys, batch.values = ([left_of(x, kind) for x in part] for part in (batch.keys, batch.values))
    variant = Attention(0.6, window=9, soft_cap=3.0, sinks=torch.tensor([-1.0, 0.5, 3.0, 40.0]))
    got = attend(kernels, batch, kv, variant).double()
    torch.testing.assert_close(got, batch.expected(variant), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_page_is_copied_with_its_scales(quantising: Quantising, kind: torch.dtype) -> None:
    """One request's pages move to others, and its attention stays what it was, to the bit."""
    kernels, batch = quantising(kind), quantised_batch(kind)
    storage = torch.full((2 * batch.layout.extent_bytes,), 0xFF, dtype=torch.uint8)
    kv = written(kernels, batch, storage=storage)
    before = attend(kernels, batch, kv, batch.plain)
    source = batch.tables[7]
    used = {page for table in batch.tables for page in table}
    target = [page for page in range(2 * batch.layout.pages_per_extent) if page not in used][: len(source)]
    kernels.copy_pages(storage, batch.layout, torch.tensor(source), torch.tensor(target))
    batch.tables[7] = target
    assert torch.equal(attend(kernels, batch, kv, batch.plain), before)


def test_a_layout_of_another_type_is_refused(quantising: Quantising) -> None:
    storage, layout = torch.zeros(2**22, dtype=torch.uint8), KVLayout(1, 2, 64, 2, 16)
    with pytest.raises(ValueError, match="1 bytes for each element and 4 for each scale, the KV layout 2 and 0"):
        quantising(torch.int8).kv_views(storage, layout, torch.bfloat16)


def test_a_layout_with_scales_that_nobody_wants_is_refused(quantising: Quantising) -> None:
    storage, layout = torch.zeros(2**22, dtype=torch.uint8), KVLayout(1, 2, 64, 1, 16, 4)
    with pytest.raises(ValueError, match="the KV layout 1 and 4"):
        quantising(None).kv_views(storage, layout, torch.bfloat16)


def test_every_type_that_settings_name_has_a_greatest_number() -> None:
    assert set(TYPES.values()) == set(GREATEST)
