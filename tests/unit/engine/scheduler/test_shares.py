"""Priorities that age, and tenants that share."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.scheduler.planning import Bench


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
