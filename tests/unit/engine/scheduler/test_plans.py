"""Who is admitted, and what a step holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sequence import TokenSequence
from tests.unit.engine.scheduler.planning import Bench

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


def test_a_page_is_kept_free_for_each_running_request_when_another_is_admitted() -> None:
    bench = Bench(pages=6, page_size=4, budget=64)
    bench.add(prompt=12, output=4)
    bench.step()
    large = bench.add(prompt=12, output=2)
    assert bench.step().admitted == ()
    bench.scheduler.remove(large)
    small = bench.add(prompt=4, output=2)
    assert bench.step().admitted == (small,)


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
