from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from kernels.cpu import convert
from kernels.cpu.library import Library, Team, load
from kernels.cpu.linear import BEST, JobStruct, Quantised, Then, linear, quantise
from kernels.cpu.packing import _ROW, Format, Matrix, Packed, Source, WeightsStruct, pack, unpack_row
from tests.unit.kernels.isas import every_isa

ROWS = [1, 2, 3, 4, 5, 6, 7, 13, 14, 15, 29, 64]
SHAPES = [(32, 64), (40, 96), (33, 130), (100, 34), (1, 576), (161, 160)]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed_as(team: Team, form: Format, floats: np.ndarray, **options: Any) -> Packed:
    return pack(team, form, [Matrix(Source.F32, floats, floats.shape[1])], **options)


def activations(library: Library, form: Format, floats: np.ndarray) -> np.ndarray | Quantised:
    if form is Format.F32:
        return floats
    return (
        convert.float_to_bf16(library, floats) if form is Format.BF16 else quantise(library, floats, form.scale_inputs)
    )


def value(library: Library, x: np.ndarray | Quantised, inputs: int) -> np.ndarray:
    """The numbers that packed activations stand for."""
    if isinstance(x, Quantised):
        groups = x.values.reshape(*x.scales.shape, x.group).astype(np.float64) * x.scales[..., None]
        return groups.reshape(len(x.values), -1)[:, :inputs]
    return (convert.bf16_to_float(library, x) if x.dtype == np.uint16 else x).astype(np.float64)


def expected(library: Library, packed: Packed, x: np.ndarray | Quantised) -> np.ndarray:
    rows = np.stack([unpack_row(library, packed, output) for output in range(packed.outputs)])
    return value(library, x, packed.inputs) @ rows.T.astype(np.float64)


def tolerance(inputs: int) -> float:
    return 1e-6 * inputs


@every_isa()
@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_at_every_tail(isa: str, form: Format, outputs: int, inputs: int) -> None:
    library = load(isa)
    with Team(library, 2) as team:
        packed = packed_as(team, form, normal(outputs, inputs))
        for rows in ROWS:
            x = activations(library, form, normal(rows, inputs, seed=rows))
            result = linear(team, packed, x, Then.STORE_FLOAT)
            np.testing.assert_allclose(result, expected(library, packed, x), rtol=1e-5, atol=tolerance(inputs))


@every_isa()
@pytest.mark.parametrize("form", list(Format))
def test_a_row_has_the_same_bits_in_any_company(isa: str, form: Format) -> None:
    """vLLM #5952: greedy output differed with the chunk size or the batch."""
    library, inputs = load(isa), 192
    x = normal(70, inputs, seed=5)
    with Team(library, 1) as one, Team(library, 3) as three:
        packed = packed_as(one, form, normal(97, inputs))
        alone = np.concatenate(
            [linear(one, packed, activations(library, form, row[None]), Then.STORE_FLOAT) for row in x]
        )
        for team in (one, three):
            for rows in [*ROWS, 70]:
                together = linear(team, packed, activations(library, form, x[:rows]), Then.STORE_FLOAT)
                np.testing.assert_array_equal(together, alone[:rows])
                shifted = linear(team, packed, activations(library, form, x[70 - rows :]), Then.STORE_FLOAT)
                np.testing.assert_array_equal(shifted, alone[70 - rows :])


@every_isa()
def test_many_rows_pass_in_several_portions(isa: str) -> None:
    """More activations than the L2 cache holds: every portion meets every tile."""
    library, inputs, rows = load(isa), 4096, 150
    with Team(library, 2) as team:
        packed = packed_as(team, Format.F32, normal(64, inputs))
        x = normal(rows, inputs, seed=1)
        result = linear(team, packed, x, Then.STORE_FLOAT)
        np.testing.assert_allclose(result, expected(library, packed, x), rtol=1e-4, atol=1e-3)


@every_isa()
@pytest.mark.parametrize("outputs", [1, 15, 16, 31, 32, 33, 47, 70])
@pytest.mark.parametrize("rows", [1, 2, 20])
def test_epilogues_at_every_tail(isa: str, outputs: int, rows: int) -> None:
    library = load(isa)
    with Team(library, 2) as team:
        packed = packed_as(team, Format.F32, normal(outputs, 64))
        x, bias = normal(rows, 64, seed=1), normal(outputs, seed=2)
        sums = linear(team, packed, x, Then.STORE_FLOAT)
        np.testing.assert_array_equal(linear(team, packed, x, Then.STORE_FLOAT, bias=bias), sums + bias)
        as_bf16 = linear(team, packed, x, Then.STORE_BF16, bias=bias)
        np.testing.assert_array_equal(as_bf16, convert.float_to_bf16(library, sums + bias))
        residual = normal(rows, outputs, seed=3)
        added = linear(team, packed, x, Then.ADD_FLOAT, to=residual.copy(), bias=bias)
        np.testing.assert_array_equal(added, residual + (sums + bias))
        best = linear(team, packed, x, Then.BEST)
        np.testing.assert_array_equal(best["index"], sums.argmax(1))
        np.testing.assert_array_equal(best["value"], sums.max(1))


@every_isa()
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_gate_and_up_with_their_activation(isa: str, columns: int, rows: int) -> None:
    library = load(isa)
    with Team(library, 2) as team:
        gate, up, x = normal(columns, 64, seed=1), normal(columns, 64, seed=2), normal(rows, 64, seed=3)
        both = [Matrix(Source.F32, side, 64) for side in (gate, up)]
        packed = pack(team, Format.F32, both, interleaved=True)
        gated = linear(team, packed, x, Then.SILU_MULTIPLY_FLOAT, columns=columns)
        product = x.astype(np.float64) @ gate.T
        np.testing.assert_allclose(gated, product / (1 + np.exp(-product)) * (x @ up.T), rtol=1e-4, atol=1e-4)
        halves = linear(team, packed, x, Then.SILU_MULTIPLY_BF16, columns=columns)
        np.testing.assert_array_equal(halves, convert.float_to_bf16(library, gated))


@every_isa()
def test_of_equal_logits_the_first_is_best_whichever_worker_finds_it(isa: str) -> None:
    rows = np.zeros((32 * 40, 8), np.float32)
    rows[[40, 77, 700, 1279]] = 1
    with Team(load(isa), 3) as team:
        packed = packed_as(team, Format.F32, rows)
        for _ in range(20):
            best = linear(team, packed, np.ones((2, 8), np.float32), Then.BEST)
            assert best.tolist() == [(8.0, 40), (8.0, 40)]


@every_isa()
def test_of_equal_logits_the_first_is_best_though_it_is_found_last(isa: str) -> None:
    """A worker that helps another comes from later outputs to earlier ones: to the last of the other's segment."""
    tiles, workers, inputs = 60, 5, 4096
    rows = np.zeros((32 * tiles, inputs), np.float32)
    firsts = [32 * tiles * worker // workers for worker in range(workers)]
    rows[[firsts[1] - 1, *firsts[1:]], :8] = 1
    x = np.ones((12, inputs), np.float32)
    with Team(load(isa), workers) as team:
        packed = packed_as(team, Format.F32, rows)
        found = {at for _ in range(100) for at in linear(team, packed, x, Then.BEST)["index"].tolist()}
    assert found == {firsts[1] - 1}


@every_isa()
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("inputs", [1, 15, 31, 32, 33, 64, 65, 576])
def test_quantised_activations(isa: str, group: int, inputs: int) -> None:
    library, rows = load(isa), normal(3, inputs)
    rows[1] = 0
    x = quantise(library, rows, group)
    padded = np.zeros((3, x.scales.shape[1], group), np.float32)
    padded.reshape(3, -1)[:, :inputs] = rows
    np.testing.assert_allclose(x.scales, np.abs(padded).max(2) / 127, rtol=1e-6)
    values = x.values.reshape(padded.shape).astype(np.int32)
    assert (np.abs(values * x.scales[..., None] - padded) <= x.scales[..., None] * 0.501).all()
    assert not values.reshape(3, -1)[:, inputs:].any()
    np.testing.assert_array_equal(x.offsets, -128 * values.sum(2))
    halves = convert.float_to_bf16(library, rows)
    again = quantise(library, convert.bf16_to_float(library, halves), group)
    from_bf16 = quantise(library, halves, group)
    np.testing.assert_array_equal(from_bf16.values, again.values)
    np.testing.assert_array_equal(from_bf16.scales, again.scales)
    np.testing.assert_array_equal(from_bf16.offsets, again.offsets)


@every_isa()
def test_extreme_integers_do_not_saturate(isa: str) -> None:
    """vpmaddubsw would: 2 * 255 * 127 doesn't fit in 16 bits."""
    library = load(isa)
    with Team(library, 1) as team:
        for form in (Format.INT8, Format.INT8_G32, Format.U4_G32):
            packed = packed_as(team, form, np.full((32, 128), 3.0, np.float32))
            x = quantise(library, np.full((1, 128), 5.0, np.float32), form.scale_inputs)
            np.testing.assert_allclose(linear(team, packed, x, Then.STORE_FLOAT), 128 * 15.0, rtol=1e-3)


def test_both_sides_agree_on_the_sizes_of_what_they_exchange() -> None:
    sizes = [ctypes.c_int64() for _ in range(3)]
    load().cdll.headrace_struct_bytes(*map(ctypes.byref, sizes))
    assert [size.value for size in sizes] == [ctypes.sizeof(WeightsStruct), _ROW.itemsize, ctypes.sizeof(JobStruct)]
    assert BEST.itemsize == 8


@every_isa()
def test_what_does_not_fit_is_refused(isa: str) -> None:
    library = load(isa)
    with Team(library, 1) as team:
        plain, bytes_ = packed_as(team, Format.F32, normal(8, 64)), packed_as(team, Format.INT8, normal(8, 64))
        with pytest.raises(TypeError, match=r"take \[rows, 64\] of float32, not \[2, 63\]"):
            linear(team, plain, normal(2, 63), Then.STORE_FLOAT)
        with pytest.raises(TypeError, match="quantised activations"):
            linear(team, bytes_, normal(2, 64), Then.STORE_FLOAT)
        with pytest.raises(ValueError, match="groups of 64, not 2 groups of 32"):
            linear(team, bytes_, quantise(library, normal(2, 64), 32), Then.STORE_FLOAT)
        with pytest.raises(ValueError, match="how many columns"):
            linear(team, plain, normal(2, 64), Then.SILU_MULTIPLY_BF16)
        with pytest.raises(ValueError, match="something to add to"):
            linear(team, plain, normal(2, 64), Then.ADD_FLOAT)
        with pytest.raises(TypeError, match=r"gives \[2, 8\] of float32, not \[2, 9\]"):
            linear(team, plain, normal(2, 64), Then.ADD_FLOAT, to=normal(2, 9))
        with pytest.raises(TypeError, match="a bias is"):
            linear(team, plain, normal(2, 64), Then.STORE_FLOAT, bias=normal(7))
        with pytest.raises(ValueError, match="groups of 32 or 64"):
            quantise(library, normal(2, 64), 48)
        with pytest.raises(TypeError, match="not float64"):
            quantise(library, np.zeros((2, 64)), 32)
