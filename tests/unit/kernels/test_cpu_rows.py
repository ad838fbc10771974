"""The operations on rows, each at every length of tail, against formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu import library, ops
from kernels.cpu.library import Team
from tests.unit.kernels.isas import every_isa
from tests.unit.kernels.paged import Array, loaded, to_bf16

SIZES = [*range(1, 35), 64, 100, 576]
TYPES = pytest.mark.parametrize("is_float", [False, True], ids=["bf16", "float"])


def randn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stored(x: Array, is_float: bool) -> Array:
    return x if is_float else to_bf16(x)


def assert_near(got: Array, expected: Array, is_float: bool) -> None:
    tolerance = 2e-6 if is_float else 4e-3
    np.testing.assert_allclose(loaded(got), expected, rtol=tolerance, atol=tolerance)


@every_isa()
@TYPES
def test_rms_norm(isa: str, is_float: bool) -> None:
    with Team(library.load(isa), 2) as team:
        for size in SIZES:
            x, weight = randn(5, size) * 40, randn(size, seed=1)
            got = ops.rms_norm(team, x, weight, 1e-3, np.float32 if is_float else np.uint16)
            exact = x.astype(np.float64)
            expected = exact / np.sqrt(np.square(exact).mean(axis=1, keepdims=True) + 1e-3) * weight
            assert_near(got, expected, is_float)


@every_isa()
def test_a_row_has_the_same_norm_in_every_batch(isa: str) -> None:
    x, weight = randn(33, 577), randn(577, seed=1)
    with Team(library.load(isa), 3) as team:
        together = ops.rms_norm(team, x, weight, 1e-5, np.float32)
        alone = [ops.rms_norm(team, x[row : row + 1], weight, 1e-5, np.float32)[0] for row in range(33)]
    np.testing.assert_array_equal(together, np.array(alone))


@every_isa()
@TYPES
def test_rows_are_added_to_the_residual_in_float(isa: str, is_float: bool) -> None:
    with Team(library.load(isa), 2) as team:
        for size in SIZES:
            residual, x = randn(5, size) * 1000, stored(randn(5, size, seed=1), is_float)
            expected = residual + loaded(x)
            ops.add_rows(team, residual, x)
            np.testing.assert_array_equal(residual, expected)


@every_isa()
@TYPES
def test_silu_and_mul(isa: str, is_float: bool) -> None:
    with Team(library.load(isa), 2) as team:
        for size in SIZES:
            gate_up = stored(randn(3, 2 * size) * 4, is_float)
            gate, up = np.split(loaded(gate_up).astype(np.float64), 2, axis=1)
            assert_near(ops.silu_and_mul(team, gate_up), gate / (1 + np.exp(-gate)) * up, is_float)


@every_isa()
@TYPES
def test_embed_takes_rows_as_float(isa: str, is_float: bool) -> None:
    ids = np.array([3, 0, 3, 10, 7], np.int32)
    with Team(library.load(isa), 2) as team:
        for size in SIZES:
            table = stored(randn(11, size), is_float)
            np.testing.assert_array_equal(ops.embed(team, table, ids), loaded(table)[ids])
        with pytest.raises(ValueError, match="outside the 11 rows"):
            ops.embed(team, table, np.array([11], np.int32))


@every_isa()
def test_wrong_shapes_and_types_are_refused(isa: str) -> None:
    with Team(library.load(isa), 1) as team:
        with pytest.raises(ValueError, match="the weight has to have the shape"):
            ops.rms_norm(team, randn(2, 8), randn(7), 1e-5, np.float32)
        with pytest.raises(TypeError, match="float32 or the uint16 of bf16, not float64"):
            ops.silu_and_mul(team, np.zeros((2, 8)))
        with pytest.raises(ValueError, match="C-contiguous"):
            ops.add_rows(team, randn(8, 8)[:, ::2], randn(8, 4))
