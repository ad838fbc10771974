"""Adapters in the CPU library, on every instruction set: as packed, alone and beside one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.cpu import library
from kernels.cpu.adapters import PackedAdapters, add_adapters, pack_adapters
from kernels.cpu.library import Team
from tests.unit.kernels.isas import every_isa
from tests.unit.kernels.paged import loaded, to_bf16

INPUTS = 75
TYPES = pytest.mark.parametrize("is_float", [False, True], ids=["bf16", "float"])


def randn(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stored(x: NDArray[np.float32], is_float: bool) -> NDArray[Any]:
    return x if is_float else to_bf16(x)


def packed(
    team: Team, widths: tuple[int, ...], rank: int, is_float: bool, interleaved: bool = False
) -> tuple[PackedAdapters, NDArray[np.float32], NDArray[np.float32]]:
    """Three adapters, and their matrices as they are stored."""
    shrink, expand = randn(3, len(widths), rank, INPUTS) / 9, randn(3, sum(widths), rank, seed=1) / 4
    shrink, expand = (loaded(stored(matrix, is_float)).astype(np.float32) for matrix in (shrink, expand))
    made = pack_adapters(team.library, shrink, expand, widths, is_float=is_float, interleaved=interleaved)
    return made, shrink, expand


@every_isa()
@TYPES
@pytest.mark.parametrize("rank", [1, 8, 13])
@pytest.mark.parametrize("widths", [(50,), (96, 32, 32), (40, 9, 9)], ids=str)
def test_each_row_gets_what_its_adapter_adds(isa: str, is_float: bool, rank: int, widths: tuple[int, ...]) -> None:
    adapter = np.array([0, 3, 1, 1, 0, 2, 3], np.int32)
    x, out = stored(randn(7, INPUTS, seed=2), is_float), stored(randn(7, sum(widths), seed=3), is_float)
    with Team(library.load(isa), 2) as team:
        adapters, shrink, expand = packed(team, widths, rank, is_float)
        before = loaded(out).copy()
        add_adapters(team, adapters, adapter, x, out)
    expected = before.astype(np.float64)
    parts = np.split(np.arange(sum(widths)), np.cumsum(widths)[:-1])
    for row, number in enumerate(adapter):
        for part, columns in enumerate(parts):
            if number:
                low = shrink[number - 1, part].astype(np.float64) @ loaded(x)[row]
                expected[row, columns] += expand[number - 1, columns] @ low
    tolerance = 1e-5 if is_float else 1e-2
    np.testing.assert_allclose(loaded(out), expected, rtol=tolerance, atol=tolerance)
    assert np.array_equal(loaded(out)[adapter == 0], before[adapter == 0])


@every_isa()
@TYPES
def test_a_row_gets_the_same_bits_in_every_batch(isa: str, is_float: bool) -> None:
    adapter = (np.arange(33) % 4).astype(np.int32)
    x, out = stored(randn(33, INPUTS), is_float), stored(randn(33, 70, seed=1), is_float)
    with Team(library.load(isa), 3) as team:
        adapters, *_ = packed(team, (48, 22), 11, is_float)
        alone = out.copy()
        for row in range(33):
            one = slice(row, row + 1)
            add_adapters(team, adapters, adapter[one].copy(), x[one].copy(), alone[one])
        add_adapters(team, adapters, adapter, x, out)
    assert np.array_equal(out, alone)


@pytest.mark.parametrize("width", [16, 24, 50])
def test_gate_and_up_lie_as_their_weights_do(team: Team, width: int) -> None:
    """Sixteen rows of the gate, then the same of up; nothing where a run isn't full."""
    adapters, _, expand = packed(team, (width, width), 4, is_float=True, interleaved=True)
    runs = adapters.expand.shape[1]
    assert runs == -(-width // 16)
    for half, numbers in ((0, slice(0, 4)), (1, slice(4, 8))):
        rows = adapters.expand[:, :, numbers, half * 16 : half * 16 + 16].swapaxes(2, 3).reshape(3, runs * 16, 4)
        assert np.array_equal(rows[:, :width], expand[:, half * width : (half + 1) * width])
    assert np.count_nonzero(adapters.expand) == np.count_nonzero(expand)
    assert adapters.spans.tolist() == [[0, 8]] * runs


def test_a_tile_takes_the_numbers_of_its_own_parts(team: Team) -> None:
    adapters, *_ = packed(team, (64, 16, 48), 3, is_float=True)
    assert adapters.low == 16
    assert adapters.spans.tolist() == [[0, 4], [0, 4], [2, 10], [6, 10]]


def test_what_does_not_fit_is_refused(team: Team) -> None:
    adapters, *_ = packed(team, (40,), 4, is_float=True)
    x, out, adapter = randn(2, INPUTS), randn(2, 40), np.array([0, 3], np.int32)
    with pytest.raises(ValueError, match="x has to have the shape"):
        add_adapters(team, adapters, adapter, randn(2, INPUTS + 1), out)
    with pytest.raises(TypeError, match="out has to be float32"):
        add_adapters(team, adapters, adapter, x, to_bf16(out))
    with pytest.raises(ValueError, match="of 2 tiles of outputs, not of 65 outputs"):
        add_adapters(team, adapters, adapter, x, randn(2, 65))
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="none of the 3"):
            add_adapters(team, adapters, np.array([0, wrong], np.int32), x, out)
