"""Each operation against a plain formula in float64, at sizes that fit no block."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from kernels.adapters import AdapterRows
from kernels.kv import UNIT_BYTES, KVLayout
from kernels.protocol import Attention, AttentionMetadata, Kernels
from kernels.weights import RUN, QuantisedWeight
from tests.unit.kernels.adapted import adapted_product, plainly_adapted

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_the_matrix_product(kernels: Kernels, dtype: torch.dtype, rows: int, bias: bool) -> None:
    weight, x = randn(70, 100, dtype=dtype) / 10, randn(rows, 100, dtype=dtype, seed=1)
    offset = randn(70, dtype=dtype, seed=2) if bias else None
    linear = kernels.linear(weight.clone(), offset)
    assert (linear.out_features, linear.in_features) == (70, 100)
    out = linear(x)
    assert out.dtype == dtype
    expected = x.double() @ weight.double().T + (offset.double() if offset is not None else 0)
    assert_near(out, expected, dtype)


def weight_of(form: str, outputs: int, inputs: int) -> QuantisedWeight:
    weight = randn(outputs, inputs) / 10
    if form in ("int8", "int4"):
        return QuantisedWeight.rounded(weight, 8 if form == "int8" else 4)
    made = QuantisedWeight.rounded(weight, 8 if form == "Q8_0" else 4, 32)
    minimums = (made.zeros * 0.9).half() if form == "Q4_1" else None
    return QuantisedWeight(made.bits, made.numbers, made.scales.half(), minimums)


@DTYPES
@pytest.mark.parametrize("form", ["int8", "int4", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("rows", [0, 1, 21])
def test_a_quantised_product_is_that_of_the_restored_weight(
    kernels: Kernels, dtype: torch.dtype, form: str, rows: int
) -> None:
    weight, x = weight_of(form, 70, 3 * RUN), randn(rows, 3 * RUN, dtype=dtype, seed=1)
    offset = randn(70, dtype=dtype, seed=2) if rows > 1 else None
    linear = kernels.quantised_linear(weight, offset)
    assert (linear.out_features, linear.in_features) == (70, 3 * RUN)
    out = linear(x)
    assert out.dtype == dtype
    expected = x.double() @ weight.restored(torch.float64).T + (offset.double() if offset is not None else 0)
    assert_near(out, expected, dtype)


def test_linear_falls_back_for_a_type_that_the_library_lacks(kernels: Kernels) -> None:
    weight, x = randn(7, 9, dtype=torch.float16), randn(3, 9, dtype=torch.float16, seed=1)
    torch.testing.assert_close(kernels.linear(weight)(x), x @ weight.T, rtol=1e-2, atol=1e-2)


@DTYPES
@pytest.mark.parametrize("widths", [(70,), (75, 9, 64)], ids=str)
def test_each_row_gets_what_its_adapter_adds_and_the_others_keep_every_bit(
    kernels: Kernels, dtype: torch.dtype, widths: tuple[int, ...]
) -> None:
    of_row = torch.tensor([2, -1, 0, 2, 2, -1, 3, -1], dtype=torch.int32)
    x, out, adapters = adapted_product(of_row, widths, 5, dtype)
    expected, untouched = plainly_adapted(x, out, of_row, adapters), out[of_row < 0].clone()
    kernels.add_adapters(x, out, AdapterRows.of(of_row, 4), adapters)
    assert_near(out, expected, dtype)
    assert torch.equal(out[of_row < 0], untouched)


@DTYPES
def test_embed_takes_rows_as_float32(kernels: Kernels, dtype: torch.dtype) -> None:
    table = randn(11, 6, dtype=dtype)
    out = kernels.embed(table, torch.tensor([3, 0, 3, 10], dtype=torch.int32))
    assert out.dtype == torch.float32
    assert torch.equal(out, table.float()[[3, 0, 3, 10]])


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@DTYPES
def test_rms_norm_divides_by_the_root_of_the_mean_square(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight = randn(5, 37) * 40, randn(37, seed=1)
    out = kernels.rms_norm(x, weight, 1e-3, dtype)
    assert out.dtype == dtype
    assert_near(out, plain_norm(x, weight, 1e-3), dtype)


def test_rms_norm_of_tiny_values_is_governed_by_eps(kernels: Kernels) -> None:
    x, weight = randn(2, 8) * 1e-4, torch.ones(8)
    assert_near(kernels.rms_norm(x, weight, 1e-2, torch.float32), plain_norm(x, weight, 1e-2), torch.float32)


@DTYPES
def test_add_rms_norm_keeps_the_sum_in_float32(kernels: Kernels, dtype: torch.dtype) -> None:
    residual, x, weight = randn(5, 37) * 1000, randn(5, 37, dtype=dtype, seed=1), randn(37, seed=2)
    expected = residual.double() + x.double()
    total, norm = kernels.add_rms_norm(residual.clone(), x, weight, 1e-6, dtype)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)
    assert_near(norm, plain_norm(expected, weight, 1e-6), dtype)


@DTYPES
def test_silu_and_mul(kernels: Kernels, dtype: torch.dtype) -> None:
    gate_up = randn(3, 26, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(kernels.silu_and_mul(gate_up.clone()), gate / (1 + (-gate).exp()) * up, dtype)


@DTYPES
def test_gelu_and_mul_has_the_tanh_form(kernels: Kernels, dtype: torch.dtype) -> None:
    gate_up = randn(3, 26, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    assert_near(kernels.gelu_and_mul(gate_up.clone()), gate / 2 * (1 + inner.tanh()) * up, dtype)


def metadata(layout: KVLayout, positions: range, pages: list[int]) -> AttentionMetadata:
    """One request that has these pages, and whose last tokens are in the step."""

    def i32(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    return AttentionMetadata(
        positions=i32(positions),
        slots=i32(pages[p // layout.page_size] * layout.page_size + p % layout.page_size for p in positions),
        query_start=i32([0, len(positions)]),
        context_len=i32([positions.stop]),
        block_table=i32(pages)[None],
        max_query=len(positions),
        max_context=positions.stop,
        layout=layout,
    )


@DTYPES
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "turned"),
    [(3, 1, 64, 64), (4, 4, 80, 80), (8, 2, 6, 6), (3, 1, 64, 24), (2, 2, 8, 0)],
)
def test_rotary_turns_pairs_of_halves(
    kernels: Kernels, dtype: torch.dtype, normalised: bool, heads: int, kv_heads: int, size: int, turned: int
) -> None:
    """Of R components, i and i + R/2 are a point in the plane, turned by the angle of its position and frequency."""
    if kernels.name == "cpu" and turned != size:
        pytest.skip("the CPU library turns whole heads")
    positions = range(14, 18)
    angles = torch.rand(20, turned // 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 6
    table = torch.stack([angles.cos(), angles.sin()], dim=1).float()
    qkv = randn(4, heads + 2 * kv_heads, size, dtype=dtype)
    q_norm, k_norm = (randn(size, seed=4), randn(size, seed=5)) if normalised else (None, None)
    layout = KVLayout(1, kv_heads, size, dtype.itemsize, 16)
    (kv,) = kernels.kv_views(torch.zeros(UNIT_BYTES, dtype=torch.uint8), layout, dtype)
    meta = kernels.prepare(metadata(layout, positions, [5, 2]), dtype)

    got = kernels.rotary_kv_write(qkv.clone(), table, meta, kv, q_norm, k_norm, norm_eps=1e-5)

    q = qkv[:, :heads].double()
    if q_norm is not None:
        q = plain_norm(q, q_norm, 1e-5)
    points = torch.complex(q[..., : turned // 2], q[..., turned // 2 : turned])
    points = points * torch.polar(torch.ones_like(angles), angles)[14:18, None]
    assert got.dtype == dtype
    assert_near(got, torch.cat([points.real, points.imag, q[..., turned:]], dim=-1), dtype)


def test_copied_pages_are_equal_and_the_others_untouched(kernels: Kernels) -> None:
    """Seen through attention, because the layout of the pool is the implementation's own."""
    layout = KVLayout(2, 1, 8, 4, 16)
    far = layout.pages_per_extent + 5
    storage = torch.zeros(2 * UNIT_BYTES, dtype=torch.uint8)
    layers = kernels.kv_views(storage, layout, torch.float32)
    identity = torch.stack([torch.ones(32, 4), torch.zeros(32, 4)], dim=1)
    meta = kernels.prepare(metadata(layout, range(32), [1, 2]), torch.float32)
    for seed, kv in enumerate(layers):
        kernels.rotary_kv_write(randn(32, 3, 8, seed=seed), identity, meta, kv)

    def look(pages: list[int]) -> Tensor:
        meta = kernels.prepare(metadata(layout, range(31, 32), pages), torch.float32)
        return torch.stack(
            [kernels.paged_attention(randn(1, 1, 8), kv, meta, Attention(1 / math.sqrt(8))) for kv in layers]
        )

    before = look([1, 2])
    assert not torch.equal(before[0], before[1])
    assert not torch.equal(look([far, 3]), before)
    kernels.copy_pages(storage, layout, torch.tensor([1, 2]), torch.tensor([far, 3]))
    assert torch.equal(look([far, 3]), before)
    assert torch.equal(look([1, 2]), before)
    assert not torch.equal(look([0, 4]), before)
