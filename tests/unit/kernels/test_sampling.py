"""Sampling: what each parameter keeps, what a seed depends on, and the distribution that comes out."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.protocol import Kernels
from kernels.reference_sampling import HEAD_TOKENS
from kernels.sampling import SamplingBatch, uniform

VOCAB = 1000


def batch(rows: int, **parameters: Any) -> SamplingBatch:
    """`rows` rows of one request each, seeded by their number; a parameter is one value or one for each row."""
    values: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": tuple(range(rows)),
        "position": 7,
        "banned": (),
    } | parameters
    per_row = {
        name: value if isinstance(value, tuple) and (value or rows == 0) and name != "banned" else (value,) * rows
        for name, value in values.items()
    }
    return SamplingBatch(**per_row)


def logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> Tensor:
    one = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return one.repeat(rows, 1)


def drawn(kernels: Kernels, rows: Tensor, **parameters: Any) -> list[int]:
    return kernels.sample(rows.clone(), batch(len(rows), **parameters)).tokens


def order(row: Tensor) -> list[int]:
    """Ids, the likeliest first, equal ones by id."""
    return sorted(range(len(row)), key=lambda i: (-float(row[i]), i))


class TestGreedy:
    @pytest.mark.parametrize(
        "parameters",
        [{"temperature": 0.0}, {"temperature": 9e-6}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}],
        ids=lambda p: str(p),
    )
    def test_the_lowest_id_of_the_greatest_logit(self, kernels: Kernels, parameters: dict[str, float]) -> None:
        rows = logits(4)
        rows[:, [900, 17, 450]] = 50.0
        assert drawn(kernels, rows, **parameters) == [17] * 4

    def test_a_tie_of_the_whole_vocabulary(self, kernels: Kernels) -> None:
        assert drawn(kernels, torch.zeros(3, VOCAB), temperature=0.0) == [0, 0, 0]

    def test_is_the_same_whatever_else_is_in_the_batch(self, kernels: Kernels) -> None:
        rows = torch.cat([logits(1, seed=i) for i in range(6)])
        alone = [drawn(kernels, rows[i : i + 1], temperature=0.0)[0] for i in range(6)]
        mixed = drawn(kernels, rows, temperature=(0.0, 5.0, 0.0, 0.7, 0.0, 1.0), top_k=(0, 3, 0, 0, 1, 0))
        assert [mixed[i] for i in (0, 2, 4)] == [alone[i] for i in (0, 2, 4)]

    def test_no_rows(self, kernels: Kernels) -> None:
        assert drawn(kernels, torch.zeros(0, VOCAB)) == []


class TestCuts:
    @pytest.mark.parametrize("top_k", [2, 5, HEAD_TOKENS, HEAD_TOKENS + 40])
    def test_top_k_keeps_the_k_likeliest(self, kernels: Kernels, top_k: int) -> None:
        rows = logits(600, scale=0.5)
        got = set(drawn(kernels, rows, top_k=top_k, temperature=5.0))
        allowed = order(rows[0])[:top_k]
        assert got <= set(allowed)
        assert len(got) > min(top_k, 100) * 0.8

    def test_top_k_takes_the_lowest_ids_of_a_tie(self, kernels: Kernels) -> None:
        rows = torch.zeros(300, VOCAB)
        rows[:, 700] = 1.0
        assert set(drawn(kernels, rows, top_k=4)) == {700, 0, 1, 2}

    @pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1])
    def test_no_top_k(self, kernels: Kernels, top_k: int) -> None:
        rows = logits(50)
        assert drawn(kernels, rows, top_k=top_k) == drawn(kernels, rows)

    @pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
    @pytest.mark.parametrize("scale", [0.3, 3.0], ids=["flat", "peaked"])
    def test_top_p_keeps_the_smallest_set_that_reaches_it(self, kernels: Kernels, top_p: float, scale: float) -> None:
        rows = logits(800, scale=scale)
        probabilities = rows[0].double().softmax(-1)
        ids = order(rows[0])
        reached = probabilities[ids].cumsum(0)
        nucleus = ids[: int((reached < top_p).sum()) + 1]
        got = set(drawn(kernels, rows, top_p=top_p))
        assert got <= set(nucleus)
        assert set(nucleus[:5]) <= got or len(nucleus) > 100

    def test_top_p_is_measured_on_what_top_k_left(self, kernels: Kernels) -> None:
        """Of four equal tokens top_k leaves two, and half of their mass is one."""
        rows = torch.full((100, VOCAB), -50.0)
        rows[:, [10, 20, 30, 40]] = 0.0
        assert set(drawn(kernels, rows, top_k=2, top_p=0.5)) == {10}
        assert set(drawn(kernels, rows, top_k=2, top_p=0.51)) == {10, 20}

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
    def test_min_p_is_relative_to_the_likeliest_at_the_temperature(self, kernels: Kernels, temperature: float) -> None:
        rows = torch.full((400, VOCAB), -1e9)
        share = torch.tensor([1.0, 0.5, 0.21, 0.19])
        rows[:, :4] = share.log() * temperature
        assert set(drawn(kernels, rows, min_p=0.2, temperature=temperature)) == {0, 1, 2}

    def test_min_p_that_cuts_behind_the_head(self, kernels: Kernels) -> None:
        rows = torch.zeros(500, VOCAB)
        rows[:, 300:] = math.log(0.05)
        got = drawn(kernels, rows, min_p=0.1)
        assert max(got) < 300
        assert max(got) > 250

    @pytest.mark.parametrize("parameters", [{"top_p": 1e-9}, {"min_p": 0.999999}, {"top_p": 1e-9, "top_k": 7}])
    def test_one_token_always_survives(self, kernels: Kernels, parameters: dict[str, float]) -> None:
        rows = logits(20)
        assert set(drawn(kernels, rows, **parameters)) == {order(rows[0])[0]}

    def test_a_banned_token_is_never_drawn(self, kernels: Kernels) -> None:
        rows = torch.zeros(200, VOCAB)
        rows[:, [3, 5]] = 30.0
        assert set(drawn(kernels, rows, banned=(3,))) == {5}
        assert set(drawn(kernels, rows, banned=(3,), temperature=0.0)) == {5}

    def test_a_vocabulary_smaller_than_the_head(self, kernels: Kernels) -> None:
        rows = torch.zeros(200, 5)
        assert set(drawn(kernels, rows)) == {0, 1, 2, 3, 4}
        assert set(drawn(kernels, rows, banned=(0, 4))) == {1, 2, 3}


class TestExtremes:
    @pytest.mark.parametrize("temperature", [1e-5, 1e-4, 0.01])
    def test_a_tiny_temperature_is_the_likeliest_token(self, kernels: Kernels, temperature: float) -> None:
        rows = logits(30) * 100
        assert set(drawn(kernels, rows, temperature=temperature)) == {order(rows[0])[0]}

    def test_huge_logits_stay_finite(self, kernels: Kernels) -> None:
        rows = logits(30) + 1e30
        rows[:, 4] = 3e38
        assert set(drawn(kernels, rows, temperature=0.5)) == {4}

    def test_a_great_temperature_is_nearly_uniform(self, kernels: Kernels) -> None:
        got = drawn(kernels, logits(3000), temperature=100.0)
        assert len(set(got)) > VOCAB * 0.8


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
