"""The sampling kernel against the torch reference: the same tokens for the same seeds, whatever the cuts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels.columns import limit_key
from kernels.reference_sampling import sample
from kernels.sampling import NO_TOKEN, SamplingBatch
from kernels.triton import sampling
from kernels.triton.checks import interpreter
from kernels.triton.checks.sanitizer import sanitized
from tests.unit.kernels.test_cpu_sampling import logits_of, random_batch

interpreter.install()


@pytest.mark.parametrize("vocab", [3, 129, 4100])
def test_everything_is_chosen_as_by_the_reference(vocab: int) -> None:
    random = np.random.default_rng(vocab)
    rows = 40 if vocab < 1000 else 12
    batch, logits = random_batch(random, rows, vocab), torch.from_numpy(logits_of(random, rows, vocab))
    with sanitized():
        got = sampling.sample(logits.clone(), batch)
    assert got == sample(logits.clone(), batch)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (700, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (900, 0.7, 0.01)],
    ids=["open", "top_k", "top_p", "min_p", "all"],
)
@pytest.mark.parametrize("ties", [False, True])
def test_draws_far_behind_the_likeliest_tokens(top_k: int, top_p: float, min_p: float, ties: bool) -> None:
    rows, vocab = 6, 4100
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3)).repeat(rows, 1)
    logits = (logits * 2).round() / 2 if ties else logits
    batch = SamplingBatch(
        (1.3,) * rows, (top_k,) * rows, (top_p,) * rows, (min_p,) * rows, tuple(range(rows)), (5,) * rows, ((),) * rows
    )
    got = sampling.choose(logits, batch).tolist()
    assert got == sample(logits.clone(), batch).tokens
    assert len(set(got)) > 2


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_broken_logits_fail_at_most_their_own_rows() -> None:
    """vLLM issue 1623"""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    logits[0], logits[1, ::2], logits[2], logits[3, :-1] = math.nan, math.nan, -math.inf, -math.inf
    batch = SamplingBatch((1.0,) * 4, (0, 5) * 2, (0.9,) * 4, (0.0,) * 4, (1, 2, 3, 4), (0,) * 4, ((),) * 4)
    got = sampling.choose(logits, batch).tolist()
    assert [got[row] for row in (0, 2, 3)] == [NO_TOKEN, NO_TOKEN, 299]
    assert got[1] % 2, "a NaN was chosen"


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1, -5])
def test_every_seed_draws_what_the_reference_draws(seed: int) -> None:
    logits = torch.zeros(1, 97)
    batch = SamplingBatch((1.0,), (0,), (1.0,), (0.0,), (seed,), (2**20,), ((),))
    assert sampling.choose(logits, batch).tolist() == sample(logits.clone(), batch).tokens


@pytest.mark.parametrize("min_p", [1e-300, 1e-9, 0.05, 0.3, 0.999999])
def test_the_key_of_min_p_is_exact(min_p: float) -> None:
    bits = torch.tensor([limit_key(min_p) - 1, limit_key(min_p)], dtype=torch.int32)
    last, first_cut = bits.view(torch.float32).double().tolist()
    assert last <= -math.log(min_p) < first_cut
