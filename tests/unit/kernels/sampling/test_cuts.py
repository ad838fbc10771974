"""Which tokens each parameter keeps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.protocol import Kernels
from kernels.reference_sampling import HEAD_TOKENS
from kernels.sampling import Adjustment
from tests.unit.kernels.sampling.rows import VOCAB, drawn, logits, order


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
        """https://github.com/vllm-project/vllm/issues/1623"""
        rows = logits(30) * 100
        assert set(drawn(kernels, rows, temperature=temperature)) == {order(rows[0])[0]}

    @pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, where Triton is interpreted
    def test_huge_logits_stay_finite(self, kernels: Kernels) -> None:
        rows = logits(30) + 1e30
        rows[:, 4] = 3e38
        assert set(drawn(kernels, rows, temperature=0.5)) == {4}

    def test_a_great_temperature_is_nearly_uniform(self, kernels: Kernels) -> None:
        got = drawn(kernels, logits(3000), temperature=100.0)
        assert len(set(got)) > VOCAB * 0.8


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_greedy_rows_are_the_same_beside_any_mixture(kernels: Kernels, data: st.DataObject) -> None:
    """https://github.com/vllm-project/vllm/issues/5404"""
    count = data.draw(st.integers(1, 8))
    greedy = [data.draw(st.booleans()) for _ in range(count)]
    column: dict[str, list[Any]] = {name: [] for name in ("temperature", "top_k", "top_p", "min_p", "adjust")}
    for row in range(count):
        column["temperature"].append(0.0 if greedy[row] else data.draw(st.floats(0.001, 50)))
        column["top_k"].append(data.draw(st.sampled_from([-1, 0, 1, 2, 50, 500, 10**9])))
        column["top_p"].append(data.draw(st.floats(0, 1)))
        column["min_p"].append(data.draw(st.floats(0, 1)))
        column["adjust"].append(
            None if greedy[row] else Adjustment(tokens=[row, 5], prompt_tokens=1, repetition=1.3, presence=0.5)
        )
    parameters: dict[str, Any] = {name: tuple(values) for name, values in column.items()}
    parameters["logprobs"] = tuple(data.draw(st.integers(-1, 20)) for _ in range(count))
    rows = torch.cat([logits(1, seed=data.draw(st.integers(0, 50))) for _ in range(count)])
    rows[:, ::97] = rows.amax()
    got = drawn(kernels, rows, **parameters)
    for row in range(count):
        if greedy[row]:
            assert got[row] == int(rows[row].argmax()) == order(rows[row])[0]
