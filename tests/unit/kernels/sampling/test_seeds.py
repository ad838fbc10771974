"""What a seed depends on, and the distribution that comes out."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.protocol import Kernels
from kernels.sampling import choice_seed, uniform
from tests.unit.kernels.sampling.rows import batch, drawn, logits, order


class TestSeeds:
    PARAMETERS: dict[str, Any] = {  # noqa: RUF012
        "temperature": (1.0, 0.7, 0.0, 2.0, 1.0, 1.3),
        "top_k": (0, 5, 0, 300, 0, 0),
        "top_p": (1.0, 0.9, 1.0, 0.8, 0.5, 1.0),
        "min_p": (0.0, 0.0, 0.0, 0.0, 0.02, 0.0),
        "seed": (11, 2**63 - 1, 3, 11, 0, 99),
        "position": (4, 900, 3, 5, 1, 77),
    }

    def test_neighbours_and_order_change_nothing(self, kernels: Kernels) -> None:
        """https://github.com/vllm-project/vllm/issues/17524"""
        rows = torch.cat([logits(1, seed=i, scale=1.0) for i in range(6)])
        together = drawn(kernels, rows, **self.PARAMETERS)
        for i in range(6):
            own = {name: (values[i],) for name, values in self.PARAMETERS.items()}
            assert drawn(kernels, rows[i : i + 1], **own) == [together[i]]
        turned = [3, 5, 0, 2, 4, 1]
        shuffled = {name: tuple(values[i] for i in turned) for name, values in self.PARAMETERS.items()}
        assert drawn(kernels, rows[turned], **shuffled) == [together[i] for i in turned]

    def test_seed_and_position_both_matter(self, kernels: Kernels) -> None:
        rows = logits(64, scale=0.1)
        base = drawn(kernels, rows, seed=(5,) * 64)
        assert len(set(base)) == 1
        assert len(set(drawn(kernels, rows))) > 50
        assert len(set(drawn(kernels, rows, seed=(5,) * 64, position=tuple(range(64))))) > 50

    def test_uniform_of_seed_0_is_splitmix64_itself(self) -> None:
        """The first outputs of the published generator with state 0."""
        published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
        assert [uniform(0, position) for position in range(3)] == [(z >> 11) / 2**53 for z in published]

    def test_uniform_is_a_fixed_function(self) -> None:
        """A change would change the output of every seeded job."""
        known = [0.749748241358, 0.153006730371]
        assert [round(uniform(s, p), 12) for s, p in [(1, 0), (2**63 - 1, 4095)]] == known

    def test_uniform_fills_the_unit_interval(self) -> None:
        """Over positions of one seed, and over seeds at one position: 64 cells, chi-square below its 1e-6 quantile."""
        for numbers in ([uniform(42, p) for p in range(20_000)], [uniform(s, 42) for s in range(20_000)]):
            assert all(0 <= x < 1 for x in numbers)
            cells = Counter(int(x * 64) for x in numbers)
            mean = len(numbers) / 64
            assert sum((cells[i] - mean) ** 2 / mean for i in range(64)) < 130


def test_a_part_of_a_batch_has_its_rows_alone(kernels: Kernels) -> None:
    rows = torch.cat([logits(1, seed=i) for i in range(5)])
    whole = batch(5, top_k=(0, 3, 0, 9, 1), forced=(-1, -1, 7, -1, -1), logprobs=(1, -1, 2, 0, -1))
    together = kernels.sample(rows.clone(), whole)
    first, rest = kernels.sample(rows[:2].clone(), whole.part(0, 2)), kernels.sample(rows[2:].clone(), whole.part(2, 5))
    assert first.tokens + rest.tokens == together.tokens
    assert (first.logprobs or []) + (rest.logprobs or []) == together.logprobs
    assert (whole.part(3, 3).seed, whole.part(0, 2).adjust) == ((), None)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_choices_have_seeds_of_their_own(seed: int) -> None:
    seeds = [choice_seed(seed, index) for index in range(16)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 16
    assert all(0 <= one < 2**63 for one in seeds)


def test_the_seeds_of_choices_are_a_fixed_function() -> None:
    """Outputs 1 and 2 of the published generator with state 0; a change would change every seeded request."""
    assert [choice_seed(0, index) for index in (1, 2)] == [0xE220A8397B1DCDAF >> 1, 0x6E789E6AA1B965F4 >> 1]


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [({}, 12), ({"top_k": 4}, 4), ({"temperature": 2.0}, 12), ({"min_p": 0.3}, None), ({"top_p": 0.8}, None)],
    ids=["plain", "top_k", "temperature", "min_p", "top_p"],
)
@pytest.mark.parametrize("vocab", [12, 200], ids=["in the head", "behind it"])
def test_frequencies_follow_softmax(kernels: Kernels, parameters: dict[str, Any], kept: int | None, vocab: int) -> None:
    """Chi-square of 6,000 draws against the exact distribution, below its 1e-6 quantile."""
    n = 6_000
    row = torch.linspace(0, 2.5, 12)
    if vocab > 12:
        row = row.repeat_interleave(vocab // 12 + 1)[:vocab]
        kept = None if kept == 12 else kept
    probabilities = exact(row, **parameters)
    if kept is not None:
        assert int((probabilities > 0).sum()) == kept
    counts = torch.zeros(vocab)
    for start in range(0, n, 2000):
        got = drawn(kernels, row.repeat(2000, 1), seed=tuple(range(start, start + 2000)), **parameters)
        counts += torch.bincount(torch.tensor(got), minlength=vocab)
    assert counts[probabilities == 0].sum() == 0
    expected = (probabilities * n)[probabilities > 0]
    statistic = float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert statistic < freedom + 4.9 * math.sqrt(2 * freedom) + 16


def exact(row: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """The distribution by its definition, with a full sort."""
    probabilities = (row.double() / temperature).softmax(-1)
    ids = order(row)
    ids = [i for i in ids if probabilities[i] >= min_p * probabilities.max()]
    ids = ids[: top_k or len(ids)]
    mass = (probabilities[ids] / probabilities[ids].sum()).cumsum(0)
    ids = ids[: int((mass < top_p).sum()) + 1]
    kept = torch.zeros_like(probabilities)
    kept[ids] = probabilities[ids]
    return kept / kept.sum()
