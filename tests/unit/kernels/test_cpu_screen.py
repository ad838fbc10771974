"""A screened head chooses the very token that the whole head would."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.cpu import convert
from kernels.cpu.buffers import aligned_bytes
from kernels.cpu.layers import Heads
from kernels.cpu.library import Library, Team, load
from kernels.cpu.linear import quantise
from kernels.cpu.packing import Format, Matrix, Packed, Source, pack, unpack_row
from kernels.cpu.screen import Screen, bounds_of, measure
from kernels.cpu.step import DecoderModel, Layer, ModelStep, StepWork
from kernels.kv import KVLayout
from kernels.sampling import NO_TOKEN, SamplingBatch
from tests.unit.kernels.isas import every_isa

Floats = NDArray[np.float32]
INPUTS = 96
DRAW = np.random.default_rng


def packed_as(team: Team, form: Format, floats: Floats) -> Packed:
    return pack(team, form, [Matrix(Source.F32, np.ascontiguousarray(floats), floats.shape[1])])


def screen_of(team: Team, head: Packed, floats: Floats) -> Screen:
    bounds = bounds_of(head.outputs)
    screen = Screen(packed_as(team, Format.INT8, floats), np.empty(bounds, np.float32), np.empty(bounds, np.float32))
    measure(team, head, screen)
    return screen


def tokens(team: Team, form: Format, head: Floats, hidden: Floats, *, screened: bool) -> list[int]:
    """The greedy tokens of rows that reach the head as `hidden` [S, inputs], normalised: no layer adds anything."""
    heads = Heads(1, 1, INPUTS, 16, form is Format.F32)
    rows, layer_rows = len(hidden), {"qkv": 3 * INPUTS, "output": INPUTS, "gate_up": 64, "down": INPUTS}
    nothing = {
        name: packed_as(team, form, np.zeros((outputs, 32 if name == "down" else INPUTS), np.float32))
        for name, outputs in layer_rows.items()
    }
    ones = np.ones(INPUTS, np.float32)
    packed_head = packed_as(team, form, head)
    model = DecoderModel(
        heads=heads,
        hidden=INPUTS,
        inner=32,
        layers=[Layer(**nothing, attention_norm=ones, mlp_norm=ones)],
        embedding=packed_as(team, form, hidden),
        head=packed_head,
        norm=ones,
        cos_sin=np.ones((1, 2, INPUTS // 2), np.float32),
        norm_eps=1e-6,
        scale=1.0,
        screen=screen_of(team, packed_head, head) if screened else None,
    )
    layout = KVLayout(1, 1, INPUTS, 4 if form is Format.F32 else 2, 16)
    arena = aligned_bytes(layout.bytes_for(rows))
    step = ModelStep(team, model, layout, rows)
    zeros = (0,) * rows
    try:
        return step.run(
            StepWork(range(rows), range(rows + 1), [1] * rows, [[i] for i in range(rows)], range(rows)),
            SamplingBatch(zeros, zeros, (1.0,) * rows, zeros, zeros, zeros, ((),) * rows),
            arena.ctypes.data,
        ).tokens
    finally:
        step.close()


def random_head(seed: int, outputs: int) -> Floats:
    return DRAW(seed).standard_normal((outputs, INPUTS)).astype(np.float32)


def with_outliers(floats: Floats, seed: int) -> Floats:
    """A few columns a hundred times as great as the others: what 8 bits of a row lose most by."""
    floats[:, DRAW(seed).choice(INPUTS, 3)] *= 100
    return floats


def twins(seed: int, outputs: int) -> Floats:
    """Every row twice, half a vocabulary apart: all logits are ties."""
    half = random_head(seed, (outputs + 1) // 2)
    return np.concatenate([half, half])[:outputs]


def near_twins(seed: int, outputs: int) -> Floats:
    """One row again and again, changed by less than 8 bits can tell."""
    return random_head(seed, 1) * (1 + 1e-3 * DRAW(seed).standard_normal((outputs, INPUTS))).astype(np.float32)


HEADS = {
    "random": random_head,
    "outliers": lambda seed, outputs: with_outliers(random_head(seed, outputs), seed),
    "twins": twins,
    "near twins": near_twins,
    "zeros": lambda _, outputs: np.zeros((outputs, INPUTS), np.float32),
    "all negative": lambda seed, outputs: -np.abs(random_head(seed, outputs)),
    "tiny": lambda seed, outputs: random_head(seed, outputs) * np.float32(1e-30),
}


@every_isa()
@pytest.mark.parametrize("form", [Format.F32, Format.BF16])
@pytest.mark.parametrize("head", list(HEADS))
def test_the_token_is_that_of_the_whole_head(isa: str, form: Format, head: str) -> None:
    with Team(load(isa), 2) as team:
        for seed, (outputs, rows) in enumerate([(1, 1), (31, 2), (33, 5), (1000, 70), (2016, 4), (3001, 9)]):
            floats = HEADS[head](seed, outputs)
            hidden = random_head(100 + seed, rows)
            hidden[::2] = np.abs(hidden[::2])
            hidden[-1] = floats[outputs // 2] if floats.any() else 1
            whole = tokens(team, form, floats, hidden, screened=False)
            assert tokens(team, form, floats, hidden, screened=True) == whole
            if head in ("twins", "zeros"):
                assert max(whole) <= outputs // 2, "the lowest id of the greatest logit"


@every_isa()
def test_outliers_among_the_inputs(isa: str) -> None:
    hidden = with_outliers(random_head(1, 20), 2)
    head = with_outliers(random_head(3, 1500), 4)
    with Team(load(isa), 2) as team:
        whole = tokens(team, Format.BF16, head, hidden, screened=False)
        assert tokens(team, Format.BF16, head, hidden, screened=True) == whole
        assert len(set(whole)) > 5


@every_isa()
def test_rows_without_numbers_get_no_token(isa: str) -> None:
    hidden = random_head(1, 6)
    hidden[2] = np.nan
    head = random_head(2, 500)
    with Team(load(isa), 2) as team:
        whole = tokens(team, Format.BF16, head, hidden, screened=False)
        assert tokens(team, Format.BF16, head, hidden, screened=True) == whole
    assert [row for row, token in enumerate(whole) if token == NO_TOKEN] == [2]


def stored(library: Library, form: Format, x: Floats) -> NDArray[np.float64]:
    """Inputs as an exact product reads them."""
    if form is Format.F32:
        return x.astype(np.float64)
    return convert.bf16_to_float(library, convert.float_to_bf16(library, x)).astype(np.float64)


@every_isa()
@pytest.mark.parametrize("form", [Format.F32, Format.BF16])
def test_no_logit_is_further_off_than_the_screen_says(isa: str, form: Format) -> None:
    """Also for the inputs that are worst: those that point where the rounding of an output's weights went."""
    library = load(isa)
    floats = with_outliers(random_head(5, 200), 6)
    with Team(library, 2) as team:
        head = packed_as(team, form, floats)
        screen = screen_of(team, head, floats)
    exact, rounded = (
        np.stack([unpack_row(library, one, output) for output in range(200)]).astype(np.float64)
        for one in (head, screen.weights)
    )
    off = (exact - rounded).astype(np.float32)
    assert np.abs(off).max() > 0
    closest = []
    for x in (random_head(7, 200), off / np.linalg.norm(off, axis=1, keepdims=True).clip(1e-9), floats):
        whole = stored(library, form, x)
        quantised = quantise(library, np.ascontiguousarray(x), 64)
        eighths = (
            quantised.values.reshape(*quantised.scales.shape, 64) * quantised.scales[..., None].astype(np.float64)
        ).reshape(len(x), -1)[:, :INPUTS]
        distance = np.abs(whole @ exact.T - eighths @ rounded.T)
        sizes, errors = np.linalg.norm(whole, axis=1), np.linalg.norm(whole - eighths, axis=1)
        bound = sizes[:, None] * screen.errors[None, :200] + errors[:, None] * screen.norms[None, :200]
        assert (distance <= bound).all()
        closest.append((distance / bound).max())
    assert max(closest) > 0.3, "the bound holds because it is right, not because it is loose"


def test_a_screen_that_fits_another_head_is_refused() -> None:
    with Team(load(), 1) as team:
        head = packed_as(team, Format.BF16, random_head(0, 64))
        screen = screen_of(team, head, random_head(0, 64))
        with pytest.raises(ValueError, match="doesn't fit a head of 40 x 96"):
            screen.check(packed_as(team, Format.BF16, random_head(0, 40)))
        with pytest.raises(ValueError, match="doesn't fit a head of 64 x 96"):
            screen.check(packed_as(team, Format.INT8_G32, random_head(0, 64)))
