"""Who gives way to whom."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.scheduler.planning import Bench


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=12))
def test_the_first_in_rank_is_never_preempted(requests: list[tuple[int, int]]) -> None:
    bench = Bench(pages=16, page_size=4, seqs=6, budget=32)
    first, *_ = [bench.add(*request) for request in requests]
    bench.drain()
    assert first.preemptions == 0


def test_a_preempted_request_waits_at_the_front_of_its_class() -> None:
    """https://github.com/vllm-project/vllm/issues/41951"""
    bench = Bench(pages=16, page_size=4, seqs=3, budget=64)
    running = [bench.add(prompt=16, output=16) for _ in range(3)]
    bench.step()
    later = bench.add(prompt=4)
    first_of_its_tenant = bench.add(prompt=4, tenant="other")
    of_another_class = bench.add(prompt=60, output=2, priority=1)
    bench.until(lambda: any(sequence.preemptions for sequence in running))
    assert [sequence.preemptions for sequence in running] == [0, 0, 1]
    order = list(bench.scheduler.waiting.in_order(0.0))
    assert order == [running[2], first_of_its_tenant, later, of_another_class]


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
