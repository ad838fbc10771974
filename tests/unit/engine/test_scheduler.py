from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.memory import PagePool
from engine.scheduler import Plan, Scheduler
from engine.sequence import TokenSequence
from engine.token_budget import RECOVER_STEPS, TokenBudget


class Bench:
    """A scheduler whose plans are carried out by adding a token wherever one is sampled."""

    def __init__(
        self, pages: int = 64, page_size: int = 4, seqs: int = 8, budget: int = 32, share: float = 1.0, **config: Any
    ) -> None:
        settings = EngineConfig("fake", max_num_seqs=seqs, max_num_batched_tokens=budget, prefill_share=share, **config)
        self.scheduler = Scheduler(PagePool(pages, page_size), settings)
        self.now_s = 0.0
        self.arrivals = 0
        self.finished: list[str] = []
        self.preempted = 0

    def add(self, prompt: int, output: int = 4, priority: int = 0, tenant: str = "default") -> TokenSequence:
        self.arrivals += 1
        sequence = TokenSequence(
            id=str(self.arrivals),
            tokens=[0] * prompt,
            prompt_tokens=prompt,
            max_len=prompt + output,
            priority=priority,
            tenant=tenant,
            arrival=self.arrivals,
        )
        self.scheduler.add(sequence, self.now_s)
        return sequence

    def step(self) -> Plan:
        plan = self.scheduler.plan(self.now_s)
        self.verify(plan)
        self.preempted += len(plan.preempted)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            [samples] = self.scheduler.commit([chunk])
            if samples:
                sequence.tokens.append(0)
                if len(sequence.tokens) == sequence.max_len:
                    self.scheduler.remove(sequence)
                    self.finished.append(sequence.id)
        self.scheduler.check()
        return plan

    def verify(self, plan: Plan) -> None:
        """What holds for every plan."""
        scheduler = self.scheduler
        scheduler.check()
        assert sum(chunk.end - chunk.start for chunk in plan.chunks) <= scheduler.budget.tokens
        assert len({chunk.sequence.id for chunk in plan.chunks}) == len(plan.chunks)
        slots: set[int] = set()
        for sequence, start, end in plan.chunks:
            assert sequence in scheduler.running
            assert sequence.computed == start < end <= len(sequence.tokens)
            slots |= {sequence.pages[at // scheduler.pool.page_size].id * 1000 + at for at in range(start, end)}
        assert len(slots) == sum(chunk.end - chunk.start for chunk in plan.chunks)
        assert bool(plan.chunks) == bool(len(scheduler.running))
        assert all(sequence in scheduler.waiting for sequence in plan.preempted)
        worst_running = max((sequence.rank for sequence in scheduler.running), default=(0, 0))
        assert all(sequence.rank > worst_running or plan.admitted for sequence in plan.preempted)

    def until(self, reached: Callable[[], bool], limit: int = 10_000) -> None:
        for _ in range(limit):
            if reached():
                return
            self.step()
        pytest.fail("no end in sight")

    def drain(self) -> None:
        self.until(lambda: not (self.scheduler.running or self.scheduler.waiting))
        assert self.scheduler.pool.available == self.scheduler.pool.total


REQUEST = st.tuples(st.integers(1, 40), st.integers(1, 24), st.integers(0, 2))


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    pages=st.integers(16, 40),
    seqs=st.integers(1, 6),
    budget=st.integers(1, 48),
    requests=st.lists(REQUEST, min_size=1, max_size=14),
)
def test_every_request_ends_whatever_arrives_and_leaves(
    data: st.DataObject, pages: int, seqs: int, budget: int, requests: list[tuple[int, int, int]]
) -> None:
    """https://github.com/sgl-project/sglang/issues/1674, https://github.com/LMCache/LMCache/issues/3688"""
    bench = Bench(pages=pages, page_size=4, seqs=seqs, budget=budget)
    alive: list[TokenSequence] = []
    aborted = 0
    for request in requests:
        alive.append(bench.add(*request))
        for _ in range(data.draw(st.integers(0, 3))):
            bench.step()
        alive = [sequence for sequence in alive if sequence.id not in bench.finished]
        if alive and data.draw(st.integers(0, 4)) == 0:
            bench.scheduler.remove(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
            bench.scheduler.check()
            aborted += 1
    bench.drain()
    assert len(bench.finished) == len(requests) - aborted


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=12))
def test_the_first_in_rank_is_never_preempted(requests: list[tuple[int, int]]) -> None:
    bench = Bench(pages=16, page_size=4, seqs=6, budget=32)
    first, *_ = [bench.add(*request) for request in requests]
    bench.drain()
    assert first.preemptions == 0


def test_a_request_that_can_never_fit_is_refused() -> None:
    """https://github.com/sgl-project/sglang/issues/28530, https://github.com/GeeeekExplorer/nano-vllm/issues/274"""
    bench = Bench(pages=4, page_size=4)
    with pytest.raises(ValueError, match="17 tokens of KV memory, and there is room for 16"):
        bench.add(prompt=10, output=8)
    assert len(bench.scheduler.waiting) == 0


def test_a_request_that_just_fits_runs_alone_to_its_end_without_preempting_itself() -> None:
    """https://github.com/sgl-project/sglang/issues/28530"""
    bench = Bench(pages=4, page_size=4)
    request = bench.add(prompt=10, output=7)
    neighbour = bench.add(prompt=1, output=2)
    bench.drain()
    assert request.preemptions == 0
    assert bench.finished == [request.id, neighbour.id]


def test_prefill_and_decode_share_a_step() -> None:
    bench = Bench()
    first = bench.add(prompt=8, output=10)
    bench.step()
    second = bench.add(prompt=8)
    plan = bench.step()
    assert [(chunk.sequence, chunk.end - chunk.start) for chunk in plan.chunks] == [(first, 1), (second, 8)]


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


def test_a_preempted_request_waits_at_the_front_of_its_class() -> None:
    """https://github.com/vllm-project/vllm/issues/41951"""
    bench = Bench(pages=16, page_size=4, seqs=3, budget=64)
    running = [bench.add(prompt=16, output=16) for _ in range(3)]
    later = bench.add(prompt=4)
    urgent_later = bench.add(prompt=60, output=2, priority=1)
    bench.until(lambda: any(sequence.preemptions for sequence in running))
    assert [sequence.preemptions for sequence in running] == [0, 0, 1]
    assert list(bench.scheduler.waiting.in_order(0.0)) == [running[2], later, urgent_later]


def test_a_preempted_request_starts_over_and_keeps_its_tokens() -> None:
    bench = Bench(pages=8, page_size=4, seqs=2, budget=64)
    bench.add(prompt=8, output=20)
    second = bench.add(prompt=8, output=20)
    bench.until(lambda: second.preemptions > 0)
    assert (second.computed, second.pages) == (0, [])
    assert len(second.tokens) > second.prompt_tokens
    bench.drain()


def test_the_victim_is_the_lowest_priority_and_then_the_latest_arrival() -> None:
    bench = Bench(pages=10, page_size=4, seqs=3, budget=64)
    low = bench.add(prompt=8, output=16, priority=5)
    first, second = bench.add(prompt=8, output=16), bench.add(prompt=8, output=16)
    bench.until(lambda: low.preemptions > 0)
    assert (first.preemptions, second.preemptions) == (0, 0)
    bench.until(lambda: second.preemptions > 0)
    bench.drain()
    assert first.preemptions == 0


def test_an_urgent_request_takes_the_slot_of_a_low_one() -> None:
    """https://github.com/vllm-project/vllm/issues/40004"""
    bench = Bench(pages=200, seqs=3, budget=32)
    low = [bench.add(prompt=4, output=50, priority=6) for _ in range(3)]
    bench.step()
    urgent = bench.add(prompt=4, output=2)
    plan = bench.step()
    assert plan.preempted == (low[2],)
    assert plan.admitted == (urgent,)
    assert urgent in [chunk.sequence for chunk in plan.chunks]


def test_an_urgent_request_takes_the_pages_of_low_ones_only_if_that_is_enough() -> None:
    """https://github.com/vllm-project/vllm/issues/40004"""
    bench = Bench(pages=12, page_size=4, seqs=8, budget=64)
    equal = bench.add(prompt=20, output=20)
    low = bench.add(prompt=20, output=4, priority=6)
    bench.step()
    too_large = bench.add(prompt=36, output=2)
    assert bench.step().preempted == ()
    bench.scheduler.remove(too_large)
    urgent = bench.add(prompt=16, output=2)
    plan = bench.step()
    assert (plan.preempted, plan.admitted) == ((low,), (urgent,))
    assert equal.preemptions == 0


def test_requests_of_one_priority_do_not_preempt_each_other_for_a_slot() -> None:
    bench = Bench(seqs=1)
    bench.add(prompt=4, output=8)
    bench.step()
    bench.add(prompt=4)
    assert bench.step().preempted == ()


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    bench = Bench(pages=12, page_size=4, seqs=8, budget=64)
    bench.add(prompt=16, output=12)
    large, small = bench.add(prompt=40, output=2), bench.add(prompt=1, output=2)
    bench.until(lambda: small in bench.scheduler.running)
    assert large not in bench.scheduler.waiting
    bench.drain()


def test_running_requests_are_not_touched_when_the_cap_falls() -> None:
    bench = Bench(seqs=4)
    for _ in range(4):
        bench.add(prompt=4, output=8)
    bench.step()
    bench.scheduler.admission.max_num_seqs = 1
    late = bench.add(prompt=4)
    plan = bench.step()
    assert (len(plan.chunks), plan.preempted, plan.admitted) == (4, (), ())
    bench.scheduler.admission.max_num_seqs = 0
    bench.add(prompt=4, priority=-1)
    assert bench.step().admitted == ()
    bench.scheduler.admission.max_num_seqs = 8
    assert late in bench.step().admitted


def test_an_urgent_request_takes_one_slot_even_above_a_lowered_cap() -> None:
    bench = Bench(pages=200, seqs=4)
    low = [bench.add(prompt=4, output=20, priority=6) for _ in range(4)]
    bench.step()
    bench.scheduler.admission.max_num_seqs = 1
    urgent = bench.add(prompt=4, output=2)
    plan = bench.step()
    assert (plan.preempted, plan.admitted) == ((low[3],), (urgent,))


def test_the_share_of_a_preempted_prompt_goes_to_whoever_is_admitted() -> None:
    bench = Bench(pages=1000, seqs=3, budget=16)
    low = [bench.add(prompt=400, priority=6) for _ in range(3)]
    bench.step()
    urgent = [bench.add(prompt=30, output=2) for _ in range(2)]
    plan = bench.step()
    assert plan.preempted == (low[2], low[1])
    assert plan.admitted == tuple(urgent)


def test_a_page_is_kept_free_for_each_running_request_when_another_is_admitted() -> None:
    bench = Bench(pages=6, page_size=4, budget=64)
    bench.add(prompt=12, output=4)
    bench.step()
    large = bench.add(prompt=12, output=2)
    assert bench.step().admitted == ()
    bench.scheduler.remove(large)
    small = bench.add(prompt=4, output=2)
    assert bench.step().admitted == (small,)


def widths(plan: Plan) -> list[int]:
    return [chunk.end - chunk.start for chunk in plan.chunks]


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


class TestClasses:
    def test_a_low_request_is_admitted_among_urgent_ones_once_it_has_waited_long_enough(self) -> None:
        bench = Bench(seqs=1, aging_s=10.0)
        bench.add(prompt=2, output=2)
        low = bench.add(prompt=2, output=2, priority=2)
        ended_s = 0.0
        while low.id not in bench.finished:
            bench.add(prompt=2, output=2)
            bench.step()
            bench.now_s += 1.0
            ended_s = bench.now_s
        assert 20.0 <= ended_s <= 45.0

    def test_age_pushes_nobody_out_and_who_was_admitted_by_it_stays(self) -> None:
        """https://github.com/vllm-project/vllm/issues/40004"""
        bench = Bench(seqs=1, aging_s=10.0)
        high = bench.add(prompt=2, output=30)
        low = bench.add(prompt=2, output=9, priority=1)
        bench.step()
        bench.now_s = 35.0
        assert bench.step().preempted == ()
        bench.until(lambda: high.id in bench.finished)
        bench.step()
        assert list(bench.scheduler.running) == [low]
        bench.add(prompt=2, output=2)
        assert bench.step().preempted == ()

    def test_an_urgent_request_passes_aged_ones_that_may_not_push_in(self) -> None:
        """https://github.com/vllm-project/vllm/issues/40004"""
        bench = Bench(seqs=2, aging_s=10.0)
        runs = [bench.add(prompt=2, output=30, priority=2) for _ in range(2)]
        bench.step()
        aged = bench.add(prompt=2, output=2, priority=2)
        bench.now_s = 60.0
        urgent = bench.add(prompt=2, output=2)
        plan = bench.step()
        assert (plan.preempted, plan.admitted) == ((runs[1],), (urgent,))
        bench.until(lambda: urgent.id in bench.finished)
        assert bench.step().admitted == (aged,)

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_requests_of_one_class_never_preempt_each_other_for_a_slot(self, data: st.DataObject) -> None:
        bench = Bench(pages=1000, seqs=2, aging_s=5.0)
        for _ in range(data.draw(st.integers(1, 20))):
            bench.add(data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)), 1, data.draw(st.sampled_from("abc")))
            bench.step()
            bench.now_s += data.draw(st.floats(0, 9))
        bench.drain()
        assert bench.preempted == 0


class TestTenants:
    def run(self, bench: Bench, requests: dict[str, list[int]], steps: int) -> dict[str, int]:
        """Tokens computed for each tenant in so many steps while all of them have more to do."""
        for tenant, prompts in requests.items():
            for prompt in prompts:
                bench.add(prompt, 8, tenant=tenant)
        tokens = dict.fromkeys(requests, 0)
        for _ in range(steps):
            for chunk in bench.step().chunks:
                tokens[chunk.sequence.tenant] += chunk.end - chunk.start
        assert {s.tenant for s in bench.scheduler.waiting} == set(requests), "the test is too short"
        return tokens

    def test_a_tenant_with_a_thousand_requests_does_not_starve_one_with_one(self) -> None:
        bench = Bench(pages=1000, seqs=4, budget=32)
        for _ in range(1000):
            bench.add(prompt=8, output=8, tenant="many")
        for _ in range(50):
            bench.step()
        one = bench.add(prompt=8, output=8, tenant="one")
        bench.until(lambda: one.id in bench.finished, limit=25)

    def test_tokens_are_shared_equally_whatever_the_sizes_of_the_requests(self) -> None:
        bench = Bench(pages=4000, seqs=8, budget=64)
        tokens = self.run(bench, {"large": [120] * 200, "small": [4] * 3000}, 600)
        assert 0.9 < tokens["large"] / tokens["small"] < 1.1

    def test_tokens_are_shared_by_weight(self) -> None:
        bench = Bench(pages=4000, seqs=8, budget=64, tenant_weights={"gold": 3.0})
        tokens = self.run(bench, {"gold": [30] * 800, "plain": [30] * 800}, 600)
        assert 2.7 < tokens["gold"] / tokens["plain"] < 3.3

    def test_a_tenant_that_paused_gets_no_more_than_its_share_afterwards(self) -> None:
        bench = Bench(pages=4000, seqs=4, budget=32)
        self.run(bench, {"steady": [20] * 800}, 400)
        tokens = self.run(bench, {"steady": [20] * 400, "back": [20] * 400}, 300)
        assert 0.85 < tokens["steady"] / tokens["back"] < 1.15

    def test_what_is_computed_again_after_a_preemption_is_not_charged(self) -> None:
        bench = Bench(pages=12, page_size=4, seqs=4, budget=64)
        for _ in range(4):
            bench.add(prompt=8, output=16, tenant="a")
        bench.drain()
        assert bench.preempted > 0
        assert bench.scheduler.shares.time("a") == 4 * (8 + 16)


class TestBatchWindow:
    def test_an_idle_engine_starts_at_once(self) -> None:
        bench = Bench(batch_window_ms=50.0)
        first = bench.add(prompt=4)
        assert bench.step().admitted == (first,)

    def test_new_requests_wait_for_companions_while_others_decode(self) -> None:
        bench = Bench(batch_window_ms=50.0)
        bench.add(prompt=4, output=50)
        bench.step()
        second = bench.add(prompt=4)
        assert bench.step().admitted == ()
        bench.now_s = 0.049
        third = bench.add(prompt=4)
        assert bench.step().admitted == ()
        bench.now_s = 0.05
        assert bench.step().admitted == (second, third)

    def test_the_wait_ends_when_the_slots_or_the_step_would_be_full(self) -> None:
        bench = Bench(batch_window_ms=50.0, seqs=3, budget=32)
        bench.add(prompt=4, output=50)
        bench.step()
        bench.add(prompt=4)
        assert bench.step().admitted == ()
        bench.add(prompt=4)
        assert len(bench.step().admitted) == 2
        bench = Bench(batch_window_ms=50.0, budget=32)
        bench.add(prompt=4, output=50)
        bench.step()
        bench.add(prompt=32)
        assert len(bench.step().admitted) == 1

    def test_nobody_waits_beside_a_prompt_that_is_being_computed(self) -> None:
        bench = Bench(batch_window_ms=50.0, budget=8, pages=100)
        bench.add(prompt=40)
        bench.step()
        bench.add(prompt=4)
        assert len(bench.step().admitted) == 1

    def test_the_wait_ends_when_the_others_do(self) -> None:
        bench = Bench(batch_window_ms=50.0)
        bench.add(prompt=4, output=2)
        bench.step()
        bench.add(prompt=4)
        assert bench.step().admitted == ()
        assert len(bench.step().admitted) == 1


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
