"""The repaired interpreter against torch, which rounds as a GPU does. Each test fails with Triton's own."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.checks import interpreter

interpreter.install()

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def _convert(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def _arithmetic(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a * b)
    tl.store(out + N + i, a + b)
    tl.store(out + 2 * N + i, tl.where(a > b, a, b))
    tl.store(out + 3 * N + i, tl.abs(a))


@triton.jit
def _product(x, y, out, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    at = i * N + j
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


@triton.jit
def _sum(x, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, N)), 0))


@triton.jit
def _count(bounds, out):
    total = 0
    for i in range(tl.load(bounds), tl.load(bounds + 1), 2):
        total += i
    tl.store(out, total)


def grid_of(target: torch.dtype) -> Tensor:
    """Numbers of every size that the target has and some beyond, those in the middle of two neighbours too."""
    if target.itemsize == 1:
        steps = torch.arange(256, dtype=torch.uint8).view(target).float()
        exact = steps[steps.isfinite()].sort().values.unique()
        middles = (exact[1:] + exact[:-1]) / 2
        values = torch.cat([exact, middles, middles * 1.01, torch.tensor([1e4, -1e6])])
    else:
        values = torch.randn(1021, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 1021)
        values = torch.cat([values, torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 0.0])])
    return torch.nn.functional.pad(values, (0, 1024 - len(values)))


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", TYPES, ids=str)
def test_conversions_round_to_nearest_even_and_saturate(source: torch.dtype, target: torch.dtype) -> None:
    x = grid_of(target).to(source)
    out = torch.zeros(1024, dtype=torch.uint8 if target.itemsize == 1 else target).view(target)
    _convert[(1,)](x, out, N=1024)
    expected = x.float()
    if target.itemsize == 1:
        expected = expected.clamp(-torch.finfo(target).max, torch.finfo(target).max)
    assert torch.equal(out.float(), expected.to(target).float())


@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_bytes_convert_exactly(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(source)
    x = torch.where(x.float().isfinite(), x.float(), 0).to(source)
    out = torch.zeros(256, dtype=target)
    _convert[(1,)](x, out, N=256)
    assert torch.equal(out, x.to(target))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_elementwise_operations_round_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(256, generator=generator).to(dtype) for _ in range(2))
    out = torch.zeros(4, 256, dtype=dtype)
    _arithmetic[(1,)](x, y, out, N=256)
    assert torch.equal(out, torch.stack([x * y, x + y, torch.maximum(x, y), x.abs()]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.float32], ids=str)
def test_matrix_products_are_those_of_the_numbers_and_not_of_their_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    out = torch.zeros(32, 32)
    _product[(1,)](x, y, out, N=32)
    torch.testing.assert_close(out, x.float() @ y.float(), rtol=1e-5, atol=1e-5)


def test_a_reduction_of_bfloat16_is_refused() -> None:
    with pytest.raises(Exception, match="convert to float32 first"):
        _sum[(1,)](torch.ones(8, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16), N=8)


def test_a_loop_may_run_between_loaded_numbers() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    _count[(1,)](torch.tensor([3, 10], dtype=torch.int32), out)
    assert out.item() == 3 + 5 + 7 + 9
