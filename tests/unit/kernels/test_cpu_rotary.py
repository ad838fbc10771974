"""The way from qkv to turned queries and to the pages, against the formula in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.cpu import library, ops
from kernels.cpu.layers import Heads, Numbers
from kernels.cpu.library import Team
from tests.unit.kernels.isas import every_isa
from tests.unit.kernels.paged import Pages, loaded, make_step, stored, to_bf16

LAYER = 1
CHUNKS = [(0, 5), (17, 1), (14, 20), (31, 1), (0, 1)]
TYPES = pytest.mark.parametrize(
    ("qkv_is_float", "is_float"), [(False, False), (True, False), (True, True)], ids=["bf16", "mixed", "float"]
)


def normalised(x: NDArray[Any], weight: NDArray[Any] | None, eps: float) -> NDArray[Any]:
    if weight is None:
        return x
    normal: NDArray[Any] = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps) * weight
    return normal


def turned(x: NDArray[Any], angles: NDArray[Any]) -> NDArray[Any]:
    """x [rows, heads, D], angles [rows, D / 2]"""
    first, second = np.split(x, 2, axis=-1)
    points: NDArray[Any] = (first + 1j * second) * np.exp(1j * angles)[:, None]
    return np.concatenate([points.real, points.imag], axis=-1)


@every_isa()
@TYPES
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias and norms"])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (2, 2, 80), (4, 1, 6), (2, 1, 256)])
def test_queries_turn_and_keys_and_values_reach_their_pages(
    isa: str, heads: int, kv_heads: int, size: int, extras: bool, qkv_is_float: bool, is_float: bool
) -> None:
    random = np.random.default_rng(1)
    shape = Heads(heads, kv_heads, size, 16, is_float)
    pages = Pages(shape, 20)
    tables = [pages.take(done + rows) for done, rows in CHUNKS]
    step = make_step(CHUNKS, tables)
    qkv = random.standard_normal((step.rows, heads + 2 * kv_heads, size)).astype(np.float32) * 2
    stored = qkv if qkv_is_float else to_bf16(qkv)
    bias, q_norm, k_norm = (random.standard_normal(s).astype(np.float32) for s in ((qkv.shape[1:]), size, size))
    options: dict[str, Any] = {"bias": bias, "q_norm": q_norm, "k_norm": k_norm} if extras else {}
    angles = random.random((40, size // 2)) * 6
    cos_sin = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    before = Pages(shape, 20)
    before.arena = pages.arena.copy()
    with Team(library.load(isa), 2) as team:
        q = ops.rotary_kv_write(
            team, step, shape, stored, cos_sin, pages.arena, LAYER * shape.layer_bytes, **options, norm_eps=1e-5
        )

    x = loaded(stored).astype(np.float64) + (bias if extras else 0)
    at = angles[step.positions]
    k_from, v_from = heads, heads + kv_heads
    tolerance = 2e-5 if is_float else 1e-2
    expected = turned(normalised(x[:, :k_from], options.get("q_norm"), 1e-5), at)
    np.testing.assert_allclose(loaded(q), expected, rtol=tolerance, atol=tolerance)
    keys = turned(normalised(x[:, k_from:v_from], options.get("k_norm"), 1e-5), at)
    for request, (done, rows) in enumerate(CHUNKS):
        mine = slice(step.query_start[request], step.query_start[request + 1])
        got_keys, got_values = pages.read(tables[request], LAYER, done, done + rows)
        np.testing.assert_allclose(loaded(got_keys), keys[mine], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(loaded(got_values), x[mine, v_from:], rtol=tolerance, atol=tolerance)
        pages.write(tables[request], LAYER, *before.read(tables[request], LAYER, done, done + rows), first=done)
    np.testing.assert_array_equal(pages.arena, before.arena)


def wide_range(random: np.random.Generator, rows: int, heads: int, size: int) -> NDArray[np.float32]:
    """Heads of every magnitude, one of zeros among them, with numbers that lie halfway between two steps."""
    qkv = random.standard_normal((rows, heads, size)) * np.exp2(random.integers(-20, 20, (rows, heads, 1)))
    qkv[1, -1] = 0
    qkv[2, -1] = np.resize([127.0, 0.5, -0.5, 1.5, -1.5, 126.5], size)  # the scale of bytes is 1
    qkv[3, -1] = np.resize([448.0, 2.0**-10, -3 * 2.0**-10, 17.0, 19.0, -(2.0**-6)], size)  # and here that of e4m3
    return qkv.astype(np.float32)


@every_isa()
@pytest.mark.parametrize("numbers", [Numbers.INT8, Numbers.E4M3], ids=str)
@pytest.mark.parametrize("is_float", [False, True], ids=["bf16", "float"])
@pytest.mark.parametrize(
    ("kv_heads", "size", "page_tokens"), [(3, 64, 16), (2, 80, 32), (1, 6, 16), (1, 256, 48), (2, 18, 16)]
)
def test_keys_and_values_are_rounded_as_torch_rounds_them(
    isa: str, kv_heads: int, size: int, page_tokens: int, is_float: bool, numbers: Numbers
) -> None:
    random = np.random.default_rng(3)
    shape = Heads(2 * kv_heads, kv_heads, size, page_tokens, is_float, numbers=numbers)
    pages = Pages(shape, 20)
    tables = [pages.take(done + rows) for done, rows in CHUNKS]
    step = make_step(CHUNKS, tables)
    qkv = wide_range(random, step.rows, 4 * kv_heads, size)
    still = np.stack([np.ones((40, size // 2)), np.zeros((40, size // 2))], axis=1).astype(np.float32)
    before = pages.arena.copy()
    with Team(library.load(isa), 2) as team:
        q = ops.rotary_kv_write(team, step, shape, qkv, still, pages.arena, LAYER * shape.layer_bytes)
    np.testing.assert_array_equal(q, stored(qkv[:, : 2 * kv_heads], shape))
    written = pages.arena.copy()
    pages.arena[:] = before
    for request, (done, _) in enumerate(CHUNKS):
        mine = slice(step.query_start[request], step.query_start[request + 1])
        keys, values = qkv[mine, 2 * kv_heads : 3 * kv_heads], qkv[mine, 3 * kv_heads :]
        pages.write(tables[request], LAYER, keys, values, first=done)
    np.testing.assert_array_equal(written, pages.arena)


@every_isa()
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("numbers", [Numbers.INT8, Numbers.E4M3], ids=str)
def test_the_scale_of_what_is_no_number_is_none(isa: str, numbers: Numbers, wrong: float) -> None:
    """Or a byte would hide it, and the request would go on with nonsense."""
    shape = Heads(1, 1, 20, 16, numbers=numbers)
    pages = Pages(shape, 2)
    table = pages.take(2)
    step = make_step([(0, 2)], [table])
    qkv = np.ones((2, 3, 20), np.float32)
    qkv[1, 1:, 19] = wrong
    still = np.stack([np.ones((2, 10)), np.zeros((2, 10))], axis=1).astype(np.float32)
    with Team(library.load(isa), 1) as team:
        ops.rotary_kv_write(team, step, shape, qkv, still, pages.arena, LAYER * shape.layer_bytes)
    for found in pages.read(table, LAYER, 0, 2):
        np.testing.assert_allclose(found[0], 1, rtol=1e-6)
        assert np.isnan(found[1]).all()


@every_isa()
def test_a_row_is_bit_equal_whatever_else_is_in_the_step(isa: str) -> None:
    random = np.random.default_rng(2)
    shape = Heads(9, 3, 64, 16)
    qkv = to_bf16(random.standard_normal((70, 15, 64)))
    norms: dict[str, Any] = {
        "q_norm": random.random(64).astype(np.float32),
        "k_norm": random.random(64).astype(np.float32),
    }
    cos_sin = random.random((70, 2, 32)).astype(np.float32)
    results = []
    with Team(library.load(isa), 3) as team:
        for chunks in ([(0, 70)], [(at, 1) for at in range(70)]):
            pages = Pages(shape, 5)
            table = pages.take(70)
            parts = []
            for done, rows in chunks:
                step = make_step([(done, rows)], [table])
                parts.append(
                    ops.rotary_kv_write(team, step, shape, qkv[done : done + rows], cos_sin, pages.arena, **norms)
                )
            results.append((np.concatenate(parts), *pages.read(table, 0, 0, 70)))
    for whole, one_by_one in zip(*results, strict=True):
        np.testing.assert_array_equal(whole, one_by_one)


@every_isa()
def test_positions_past_the_table_are_refused(isa: str) -> None:
    shape = Heads(2, 1, 16, 16)
    pages = Pages(shape, 2)
    step = make_step([(8, 1)], [pages.take(9)])
    with Team(library.load(isa), 1) as team, pytest.raises(ValueError, match="position 8 is past the 8"):
        ops.rotary_kv_write(
            team, step, shape, np.zeros((1, 4, 16), np.uint16), np.zeros((8, 2, 8), np.float32), pages.arena
        )
