"""Sampling of the CPU library against the torch reference, on each instruction set."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels.cpu import library
from kernels.cpu.library import Team
from kernels.cpu.sampling import Sampler
from kernels.reference_sampling import sample
from kernels.sampling import NO_TOKEN, Adjustment, Sampled, SamplingBatch, uniform
from tests.unit.kernels.isas import every_isa


def random_batch(random: np.random.Generator, rows: int, vocab: int) -> SamplingBatch:
    def choose(*options: Any) -> tuple[Any, ...]:
        return tuple(options[i] for i in random.integers(len(options), size=rows))

    def adjustment() -> Adjustment:
        tokens = random.integers(0, vocab, 30).tolist()
        allowed = random.integers(0, 256, -(-vocab // 8), np.uint8).tobytes()
        return Adjustment(
            tokens=tokens,
            prompt_tokens=int(random.integers(31)),
            repetition=float(random.choice([1.0, 1.3, 0.8])),
            frequency=float(random.choice([0.0, 0.5, -0.25])),
            presence=float(random.choice([0.0, 0.7])),
            bias=tuple((int(i), float(random.normal() * 4)) for i in set(random.integers(0, vocab, 3).tolist())),
            allowed=allowed if random.random() < 0.3 else None,
        )

    return SamplingBatch(
        temperature=choose(0.0, 0.3, 0.8, 1.0, 1.0, 2.0, 50.0),
        top_k=choose(0, 0, -1, 1, 5, 40, 128, 129, 700, vocab, vocab + 1),
        top_p=choose(1.0, 1.0, 0.0, 0.3, 0.9, 0.95, 0.999),
        min_p=choose(0.0, 0.0, 0.0, 0.02, 0.3, 1.0),
        seed=tuple(random.integers(0, 2**63, rows).tolist()),
        position=tuple(random.integers(0, 5000, rows).tolist()),
        banned=tuple(tuple(random.integers(0, vocab // 2, n).tolist()) for n in random.choice([0, 0, 3], rows)),
        adjust=tuple(adjustment() if random.random() < 0.3 else None for _ in range(rows)),
        forced=tuple(int(t) for t in np.where(random.random(rows) < 0.8, -1, random.integers(0, vocab, rows))),
        logprobs=choose(-1, -1, 0, 1, 5, 20, vocab),
    )


def assert_same(got: Sampled, expected: Sampled) -> None:
    assert got.tokens == expected.tokens
    if got.logprobs is None or expected.logprobs is None:
        assert got.logprobs is expected.logprobs
        return
    for mine, other in zip(got.logprobs, expected.logprobs, strict=True):
        if mine is None or other is None:
            assert mine is other
            continue
        assert (mine.token, mine.rank) == (other.token, other.rank)
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-5, nan_ok=True)
        assert [token for token, _ in mine.top] == [token for token, _ in other.top]
        np.testing.assert_allclose([p for _, p in mine.top], [p for _, p in other.top], rtol=0, atol=1e-5)


def logits_of(random: np.random.Generator, rows: int, vocab: int) -> NDArray[np.float32]:
    """Of every flatness; those of a third of the rows are rounded, so that many are equal."""
    logits: NDArray[np.float32] = random.standard_normal((rows, vocab), np.float32)
    logits *= random.choice([0.02, 0.5, 2.0, 8.0], (rows, 1)).astype(np.float32)
    logits[::3] = np.round(logits[::3] * 2) / 2
    return logits


@every_isa()
@pytest.mark.parametrize("vocab", [3, 63, 64, 65, 129, 1000, 8191, 20_000])
def test_everything_is_chosen_and_reported_as_by_the_reference(isa: str, vocab: int) -> None:
    random = np.random.default_rng(vocab)
    with Team(library.load(isa), 2) as team:
        sampler = Sampler(team, vocab)
        for rows in (1, 40):
            batch, logits = random_batch(random, rows, vocab), logits_of(random, rows, vocab)
            before = logits.copy()
            got = sampler.sample(logits, batch)
            np.testing.assert_array_equal(logits, before)
            assert_same(got, sample(torch.from_numpy(logits), batch))


@every_isa()
def test_draws_behind_the_head_follow_the_reference(isa: str) -> None:
    """Flat rows without any cut: nearly every draw falls outside the first tokens."""
    vocab, rows = 5000, 300
    logits = (np.random.default_rng(1).standard_normal((1, vocab)) * 0.3).astype(np.float32).repeat(rows, 0)
    batch = SamplingBatch(
        (1.0,) * rows, (0,) * rows, (1.0,) * rows, (0.0,) * rows, tuple(range(rows)), (3,) * rows, ((),) * rows
    )
    with Team(library.load(isa), 2) as team:
        got = Sampler(team, vocab).sample(logits, batch).tokens
    assert got == sample(torch.from_numpy(logits.copy()), batch).tokens
    assert len(set(got)) > 250


@every_isa()
def test_cuts_far_behind_the_head_follow_the_reference(isa: str) -> None:
    """Nuclei of thousands of tokens, which are found without sorting the row."""
    vocab, rows = 30_000, 40
    random = np.random.default_rng(2)
    logits = random.standard_normal((rows, vocab), np.float32)
    logits[::4] = np.round(logits[::4])
    top_p, min_p = (tuple(random.choice(options, rows).tolist()) for options in ([1.0, 0.9, 0.999], [0.0, 0.05, 1e-3]))
    batch = SamplingBatch((1.0,) * rows, (0,) * rows, top_p, min_p, tuple(range(rows)), (3,) * rows, ((),) * rows)
    with Team(library.load(isa), 2) as team:
        got = Sampler(team, vocab).sample(logits, batch).tokens
    assert got == sample(torch.from_numpy(logits.copy()), batch).tokens
    order = np.argsort(-logits, axis=1, kind="stable")
    places = [int((order[row] == token).argmax()) for row, token in enumerate(got)]
    assert sum(place > 1024 for place in places) > rows // 2


@every_isa()
def test_a_place_among_the_first_of_a_wide_nucleus(isa: str) -> None:
    """The cut lies far behind the head, and what is drawn right behind the greatest value."""
    vocab = 20_000
    logits = np.random.default_rng(5).permutation(-5e-7 * np.arange(vocab)).astype(np.float32)
    seeds = tuple(seed for seed in range(6000) if uniform(seed, 3) < 0.01)
    rows = len(seeds)
    batch = SamplingBatch((1.0,) * rows, (0,) * rows, (0.9,) * rows, (0.0,) * rows, seeds, (3,) * rows, ((),) * rows)
    table = np.tile(logits, (rows, 1))
    with Team(library.load(isa), 2) as team:
        got = Sampler(team, vocab).sample(table, batch)
    assert rows > 40
    assert got.tokens == sample(torch.from_numpy(table), batch).tokens


@every_isa()
def test_nan_and_infinite_logits_fail_at_most_their_own_rows(isa: str) -> None:
    """vLLM issue 1623"""
    vocab = 1000
    logits = np.random.default_rng(0).standard_normal((6, vocab)).astype(np.float32)
    logits[0] = np.nan
    logits[1, ::2] = np.nan
    logits[2] = -np.inf
    logits[3, 5] = np.inf
    logits[4, :-1] = -np.inf
    batch = SamplingBatch(
        (1.0,) * 6, (0, 5) * 3, (0.9, 1.0, 1.0) * 2, (0.0,) * 6, tuple(range(6)), (0,) * 6, ((),) * 6, logprobs=(5,) * 6
    )
    with Team(library.load(isa), 2) as team:
        sampler = Sampler(team, vocab)
        got = sampler.sample(logits, batch)
        alone = sampler.sample(logits[5:], replace(one_row(batch, 5), logprobs=None)).tokens
    assert got.tokens[:4] == [NO_TOKEN] * 4
    assert got.tokens[4] == vocab - 1
    assert got.tokens[5] == alone[0]
    assert got.logprobs is not None
    tops = [told.top for told in got.logprobs if told is not None]
    assert [len(top) for top in tops] == [0, 0, 0, 0, 5, 5]


def one_row(batch: SamplingBatch, row: int) -> SamplingBatch:
    columns = ("temperature", "top_k", "top_p", "min_p", "seed", "position", "banned", "adjust", "forced", "logprobs")
    cut = {name: getattr(batch, name) for name in columns}
    own: dict[str, Any] = {name: None if values is None else values[row : row + 1] for name, values in cut.items()}
    return SamplingBatch(**own)


@every_isa()
def test_a_row_is_the_same_whatever_its_neighbours_and_threads(isa: str) -> None:
    """vLLM issues 51226 and 17524."""
    random = np.random.default_rng(9)
    vocab, rows = 3000, 24
    batch, logits = random_batch(random, rows, vocab), logits_of(random, rows, vocab)
    with Team(library.load(isa), 1) as one, Team(library.load(isa), 3) as three:
        together = Sampler(three, vocab).sample(logits, batch)
        assert together.logprobs is not None
        alone = Sampler(one, vocab)
        for row in range(rows):
            single = alone.sample(logits[row : row + 1], one_row(batch, row))
            assert single.tokens == [together.tokens[row]]
            assert (single.logprobs or [None]) == [together.logprobs[row]]


@every_isa()
def test_ids_outside_the_vocabulary_are_refused(isa: str) -> None:
    """They would be written past the row: vLLM issue 6866."""
    batch = SamplingBatch((1.0,), (0,), (1.0,), (0.0,), (0,), (0,), ((),))
    logits = np.zeros((1, 10), np.float32)
    with Team(library.load(isa), 1) as team:
        sampler = Sampler(team, 10)
        for bad in (
            replace(batch, banned=((10,),)),
            replace(batch, forced=(10,)),
            replace(batch, adjust=(Adjustment(bias=((-1, 1.0),)),)),
            replace(batch, adjust=(Adjustment(tokens=[3, 10], repetition=2.0),)),
        ):
            with pytest.raises(ValueError, match="outside the vocabulary of 10"):
                sampler.sample(logits, bad)
        with pytest.raises(ValueError, match="hold no bit for each of 10"):
            sampler.sample(logits, replace(batch, adjust=(Adjustment(allowed=b"\xff"),)))
        with pytest.raises(ValueError, match="the logits has to have the shape"):
            sampler.sample(np.zeros((1, 9), np.float32), batch)


@every_isa()
def test_logprobs_are_log_softmax(isa: str) -> None:
    logits = np.array([[0.0, math.log(3.0), -np.inf, 0.0]], np.float32)
    batch = SamplingBatch((0.0,), (0,), (1.0,), (0.0,), (0,), (0,), ((),), logprobs=(3,))
    with Team(library.load(isa), 1) as team:
        [report] = Sampler(team, 4).sample(logits, batch).logprobs or []
    assert report is not None
    assert (report.token, report.rank) == (1, 1)
    assert report.logprob == pytest.approx(math.log(3 / 5), abs=1e-6)
    assert [token for token, _ in report.top] == [1, 0, 3]
