"""Long prompts beside others: chunks, their share of a step, and the budget of tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.token_budget import RECOVER_STEPS, TokenBudget
from tests.unit.engine.scheduler.planning import Bench, widths


def test_a_long_prompt_is_computed_in_chunks_within_the_budget() -> None:
    bench = Bench(budget=8)
    bench.add(prompt=20, output=1)
    assert [[chunk[1:] for chunk in bench.step().chunks] for _ in range(3)] == [[(0, 8)], [(8, 16)], [(16, 20)]]


def test_decoding_requests_are_not_stalled_by_an_older_long_prompt() -> None:
    """https://github.com/vllm-project/vllm/issues/10774"""
    bench = Bench(pages=200, budget=16)
    bench.add(prompt=400, output=2)
    short = bench.add(prompt=4, output=20)
    bench.step()
    for _ in range(19):
        assert short in [chunk.sequence for chunk in bench.step().chunks]
    assert bench.finished == [short.id]


def test_a_long_prompt_leaves_half_of_the_budget_to_others_that_can_use_it() -> None:
    """https://github.com/vllm-project/vllm/issues/10774"""
    bench = Bench(pages=200, budget=16)
    bench.add(prompt=400)
    assert [chunk.end - chunk.start for chunk in bench.step().chunks] == [16]
    bench.add(prompt=6)
    assert [chunk.end - chunk.start for chunk in bench.step().chunks] == [10, 6]
    bench.add(prompt=100)
    assert [chunk.end - chunk.start for chunk in bench.step().chunks] == [1, 8, 7]


class TestPrefillShare:
    def test_prompts_take_their_share_of_a_step_in_which_others_decode(self) -> None:
        """https://github.com/vllm-project/vllm/issues/10774"""
        bench = Bench(pages=1000, budget=64, share=0.25)
        bench.add(prompt=8, output=40)
        bench.step()
        bench.add(prompt=200)
        assert [widths(bench.step()) for _ in range(3)] == [[1, 16]] * 3

    def test_the_whole_budget_is_theirs_when_nobody_decodes(self) -> None:
        bench = Bench(pages=1000, budget=64, share=0.25)
        bench.add(prompt=200)
        assert [widths(bench.step()) for _ in range(4)] == [[64], [64], [64], [8]]

    @settings(max_examples=100, deadline=None)
    @given(
        share=st.sampled_from([0.01, 0.1, 0.25, 0.5, 1.0]),
        requests=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 24)), min_size=1, max_size=12),
        budget=st.integers(8, 64),
    )
    def test_no_step_with_decodes_computes_more_prompt_than_that(
        self, share: float, requests: list[tuple[int, int]], budget: int
    ) -> None:
        bench = Bench(pages=100, budget=budget, share=share)
        for request in requests:
            bench.add(*request)
        while bench.scheduler.running or bench.scheduler.waiting:
            remaining = {s.id: s.remaining for s in [*bench.scheduler.running, *bench.scheduler.waiting]}
            plan = bench.step()
            prompts = sum(c.end - c.start for c in plan.chunks if remaining[c.sequence.id] > 1)
            if any(remaining[c.sequence.id] == 1 for c in plan.chunks):
                assert prompts <= max(1, int(share * budget))

    def test_one_long_prompt_takes_at_most_half_of_the_share(self) -> None:
        """https://github.com/vllm-project/vllm/issues/10774"""
        bench = Bench(pages=1000, budget=64, share=0.5)
        bench.add(prompt=4, output=60)
        bench.step()
        bench.add(prompt=400)
        assert widths(bench.step()) == [1, 32]
        bench.add(prompt=10, output=2)
        assert widths(bench.step()) == [1, 22, 10]


def test_a_shortage_of_memory_halves_the_budget_until_steps_go_well_again() -> None:
    budget = TokenBudget(64, prefill_share=0.5)
    budget.halve()
    assert (budget.tokens, budget.prompts(decoding=1), budget.prompts(decoding=0)) == (32, 16, 32)
    for _ in range(RECOVER_STEPS - 1):
        budget.recover()
    assert budget.tokens == 32
    budget.recover()
    assert budget.tokens == 64
    for _ in range(10):
        budget.halve()
    assert (budget.tokens, budget.prompts(1)) == (1, 0)
