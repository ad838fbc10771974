"""Quantised products and low-rank adapters against float64, at sizes that fit no block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.adapters import AdapterRows
from kernels.triton.checks import interpreter
from kernels.triton.checks.sanitizer import sanitized
from kernels.triton.linear import QuantisedLinear
from kernels.triton.lora import add_adapters
from kernels.weights import GROUP, Bits, QuantisedWeight
from tests.unit.kernels.adapted import adapted_product, plainly_adapted

interpreter.install()

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 19, 70])
def test_a_quantised_product_is_that_of_the_rounded_weight(bits: Bits, rows: int, dtype: torch.dtype) -> None:
    weight, x = QuantisedWeight.rounded(randn(75, 3 * GROUP) / 14, bits), randn(rows, 3 * GROUP, seed=1).to(dtype)
    bias = randn(75, seed=2).to(dtype) if rows > 1 else None
    with sanitized():
        got = QuantisedLinear("sm_90", weight, bias)(x)
    expected = x.double() @ weight.restored(torch.float64).T + (0 if bias is None else bias.double())
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("bits", [8, 4])
def test_few_rows_read_each_weight_once(bits: Bits) -> None:
    """What bounds such a product is its weight. Two programs share the 64 outputs, and each reads the rows."""
    weight, x = QuantisedWeight.rounded(randn(64, 4 * GROUP), bits), randn(8, 4 * GROUP, seed=1).to(torch.bfloat16)
    with sanitized() as report:
        QuantisedLinear("sm_90", weight)(x)
    assert report.loaded_bytes == weight.numbers.nbytes + weight.scales.nbytes + 2 * x.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [8, 24])
def test_each_row_gets_its_own_adapter_or_none(rank: int, dtype: torch.dtype) -> None:
    of_row = torch.tensor([2, -1, 0, 2, 2, -1, 3] + [0] * 20 + [-1], dtype=torch.int32)
    x, out, adapters = adapted_product(of_row, (75, 9, 64), rank, dtype)
    expected, untouched = plainly_adapted(x, out, of_row, adapters), out[of_row < 0].clone()
    with sanitized():
        add_adapters(x, out, AdapterRows.of(of_row, 4), adapters, "sm_90")
    torch.testing.assert_close(out.double(), expected, rtol=3 * TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])
    assert torch.equal(out[of_row < 0], untouched)
