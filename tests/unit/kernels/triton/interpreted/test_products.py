"""Quantised products and low-rank adapters against float64, at sizes that fit no block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.adapters import AdapterRows
from kernels.triton.checks import interpreter
from kernels.triton.checks.sanitizer import sanitized
from kernels.triton.linear import GROUP, QuantisedLinear, pack_int4, quantise
from kernels.triton.lora import add_adapters
from tests.unit.kernels.adapted import adapted_product, plainly_adapted

interpreter.install()

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 19, 70])
def test_a_quantised_product_is_that_of_the_rounded_weight(bits: int, rows: int, dtype: torch.dtype) -> None:
    weight, x = randn(75, 3 * GROUP) / 14, randn(rows, 3 * GROUP, seed=1).to(dtype)
    bias = randn(75, seed=2).to(dtype) if rows > 1 else None
    with sanitized():
        got = QuantisedLinear.of("sm_90", bits, weight, bias)(x)
    quantised, scales = quantise(weight, bits)
    rounded = quantised.double() * scales.double().repeat_interleave(GROUP, 1)
    expected = x.double() @ rounded.T + (0 if bias is None else bias.double())
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    error = (rounded - weight.double()).norm() / weight.norm()
    assert error < (0.01 if bits == 8 else 0.12)


def test_four_bits_lie_two_to_a_byte() -> None:
    quantised = torch.arange(-8, 8).repeat(4).view(1, GROUP).to(torch.int8)
    packed = pack_int4(quantised)
    assert packed.shape == (1, GROUP // 2)
    assert torch.equal((packed & 15).int() - 8, quantised[:, : GROUP // 2].int())
    assert torch.equal((packed >> 4).int() - 8, quantised[:, GROUP // 2 :].int())


def test_a_weight_that_fits_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match="100 inputs can't be cut into groups of 64"):
        quantise(torch.zeros(2, 100), 8)


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
