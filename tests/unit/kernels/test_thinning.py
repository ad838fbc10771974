"""Thinning of a context: the reference by the formula, and every implementation as the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.kv import KVLayout, Thinning
from kernels.protocol import Attention, Kernels
from kernels.thinning import chosen
from tests.unit.kernels.conftest import Quantising
from tests.unit.kernels.test_attention import TOLERANCE, Ragged, attend, written
from tests.unit.kernels.test_quantised import left_of

WORK = {"tokens": 90, "kept": 41, "first": 4, "last": 16}


def thinned(batch: Ragged, r: int, tokens: Tensor) -> None:
    """Let request `r` of the batch have the chosen tokens [kept, G] only."""
    index = tokens[..., None].expand(-1, -1, batch.size)
    batch.keys[r] = batch.keys[r].take_along_dim(index, 0)
    batch.values[r] = batch.values[r].take_along_dim(index, 0)
    batch.requests = [*batch.requests[:r], (1, len(tokens)), *batch.requests[r + 1 :]]


def test_the_ends_stay_and_the_most_distinct_of_the_middle() -> None:
    keys = torch.zeros(10, 2, 4)
    keys[:, :, 0] = 1.0  # all alike
    keys[4, 0, 1] = 2.0
    keys[6, 1, 2] = -3.0
    keys[8, 1, 1] = 0.5
    work = Thinning([0], tokens=10, kept=5, first=2, last=1)
    tokens = chosen(keys, work)
    assert tokens[:, 0].tolist() == [0, 1, 2, 4, 9], "of equals the earliest"
    assert tokens[:, 1].tolist() == [0, 1, 6, 8, 9]


def test_the_length_of_a_key_changes_nothing() -> None:
    keys = torch.randn(90, 3, 16, generator=torch.Generator().manual_seed(1))
    work = Thinning([0], **WORK)
    stretched = keys * torch.logspace(-3, 3, 90)[:, None, None]
    assert torch.equal(chosen(keys, work), chosen(stretched, work))
    assert len(set(map(tuple, chosen(keys, work).T.tolist()))) == 3, "every head has its own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 2, 64, 16), (9, 3, 80, 32), (2, 1, 6, 16)], ids=str)
def test_attention_sees_what_is_kept_and_nobody_else_notices(
    kernels: Kernels, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    batch = Ragged([(1, 40), (1, 90), (3, 17)], *shape, dtype)
    storage = torch.full((2 * batch.layout.extent_bytes,), 0xFF, dtype=torch.uint8)
    kv = written(kernels, batch, storage=storage)
    layers = kernels.kv_views(storage, batch.layout, dtype)
    work = Thinning(batch.tables[1], **WORK)
    before = batch.expected(batch.plain)
    kernels.thin(layers, batch.layout, work)
    thinned(batch, 1, chosen(batch.keys[1], work))
    got = attend(kernels, batch, kv, batch.plain)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), batch.expected(batch.plain), rtol=tolerance, atol=tolerance)
    assert not torch.allclose(got[1].double(), before[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantised_heads_move_with_their_scales(quantising: Quantising, kind: torch.dtype, dtype: torch.dtype) -> None:
    kernels = quantising(kind)
    batch = Ragged([(1, 90), (1, 90)], 4, 2, 64, 16, dtype)
    batch.layout = KVLayout(2, 2, 64, 1, 16, 4)
    storage = torch.full((2 * batch.layout.extent_bytes,), 0xFF, dtype=torch.uint8)
    kv = written(kernels, batch, storage=storage)
    batch.keys, batch.values = ([left_of(x, kind) for x in part] for part in (batch.keys, batch.values))
    work = Thinning(batch.tables[0], **WORK)
    kernels.thin(kernels.kv_views(storage, batch.layout, dtype), batch.layout, work)
    thinned(batch, 0, chosen(batch.keys[0], work))
    got = attend(kernels, batch, kv, Attention(0.2))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), batch.expected(Attention(0.2)), rtol=tolerance, atol=tolerance)
