"""Requests that are ended from outside: by an abort or by their deadline."""

from __future__ import annotations

import pytest
from headrace.contract import Reason
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import EngineRequest, FinishReason, RequestRefused, SamplingParams
from tests.unit.engine.bench import ENDLESS, PAGE_BYTES, Bench, Clock, make_bench, scripted


class TestAbort:
    @pytest.mark.parametrize("pages", [1000, 12])
    def test_is_exact_at_every_step(self, pages: int) -> None:
        """https://github.com/sgl-project/sglang/issues/1674"""
        whole = {n: make_bench().one("p" * (9 + n), max_tokens=12).text for n in range(3)}
        for at in range(40):
            bench = make_bench(pages=pages, max_num_batched_tokens=8)
            for number in range(3):
                bench.add(str(number), "p" * (9 + number), max_tokens=12)
            for _ in range(at):
                bench.step()
            victim = str(at % 3)
            had = bench.tokens.get(victim, ())
            already = victim in bench.outputs
            bench.engine.abort(victim)
            bench.engine.abort(victim)
            bench.engine.check()
            outputs = bench.run()
            for number in range(3):
                output = outputs[str(number)]
                if str(number) == victim and not already:
                    assert (output.finish_reason, output.token_ids) == (FinishReason.ABORT, had)
                    assert whole[number].startswith(output.text)
                else:
                    assert (output.finish_reason, output.text) == (FinishReason.LENGTH, whole[number])

    def test_frees_the_pages_at_once_and_reports_at_the_next_step(self) -> None:
        bench = make_bench()
        bench.add("a", "x" * 30, **ENDLESS)
        bench.step()
        assert bench.engine.stats().pages_free < 1000
        bench.engine.abort("a")
        assert bench.engine.stats().pages_free == 1000
        assert bench.engine.has_work
        [output] = bench.step().finished
        assert output.finish_reason is FinishReason.ABORT
        assert not bench.engine.has_work

    @pytest.mark.in_turn
    def test_keeps_what_was_held_back_for_a_stop(self) -> None:
        bench = make_bench(scripted(list(b"ab</")))
        bench.add("a", "p", max_tokens=50, stop="</end>")
        for _ in range(4):
            bench.step()
        bench.engine.abort("a")
        assert bench.run()["a"].text == "ab</"

    def test_of_an_unknown_id_does_nothing(self) -> None:
        bench = make_bench()
        bench.engine.abort("nobody")
        assert not bench.engine.has_work

    @settings(max_examples=80, deadline=None)
    @given(data=st.data(), pages=st.integers(10, 30), seqs=st.integers(1, 4), budget=st.integers(1, 24))
    def test_in_any_order_with_arrivals_and_failures_loses_nothing(
        self, data: st.DataObject, pages: int, seqs: int, budget: int
    ) -> None:
        """https://github.com/LMCache/LMCache/issues/3688, https://github.com/sgl-project/sglang/issues/1674"""
        swap = data.draw(st.sampled_from([0, 6 * PAGE_BYTES, 2**20]))
        bench = make_bench(pages=pages, max_num_seqs=seqs, max_num_batched_tokens=budget, swap_space_bytes=swap)
        count = data.draw(st.integers(1, 8))
        for number in range(count):
            prompt = data.draw(st.sampled_from(["p", f"{number}: prompt of some pages", "<<raise:2>>", "<<eos:3>>"]))
            bench.add(
                str(number),
                prompt,
                priority=data.draw(st.integers(0, 1)),
                max_tokens=data.draw(st.sampled_from([0, 1, 10, 30])),
            )
            for _ in range(data.draw(st.integers(0, 6))):
                bench.step()
            bench.engine.abort(str(data.draw(st.integers(0, count))))
            bench.engine.check()
        for steps, victim in data.draw(st.lists(st.tuples(st.integers(1, 8), st.integers(0, count)), max_size=8)):
            for _ in range(steps):
                bench.step()
            bench.engine.abort(str(victim))
            bench.engine.check()
        outputs = bench.run()
        assert sorted(outputs) == [str(number) for number in range(count)]
        assert sum(bench.engine.stats().requests_finished.values()) == count
        for output in outputs.values():
            assert (output.finish_reason is FinishReason.ERROR) == (output.error is not None)


class TestDeadlines:
    def test_a_request_ends_when_its_deadline_passes_running_or_waiting(self) -> None:
        clock = Clock()
        bench = make_bench(max_num_seqs=1, clock=clock)
        bench.add("runs", "p", deadline_s=105.0, **ENDLESS)
        bench.add("waits", "p", deadline_s=105.0, **ENDLESS)
        bench.add("patient", "p", deadline_s=1000.0)
        for _ in range(5):
            bench.step()
        assert bench.engine.rest_s() == 5.0
        clock.now_s = 105.0
        steps = bench.engine.stats().steps
        result = bench.step()
        assert {output.request_id for output in result.finished} == {"runs", "waits"}
        for output in result.finished:
            assert (output.finish_reason, output.error_code) == (FinishReason.ABORT, Reason.DEADLINE_EXCEEDED)
        assert len(bench.outputs["runs"].token_ids) == steps
        assert bench.run()["patient"].finish_reason is FinishReason.LENGTH
        assert bench.engine.rest_s() is None

    def test_one_that_is_over_at_the_start_never_runs(self) -> None:
        bench = make_bench(clock=Clock(10.0))
        bench.add("late", "p", deadline_s=9.0)
        assert bench.run()["late"].error_code == Reason.DEADLINE_EXCEEDED
        assert (bench.engine.stats().steps, bench.admitted) == (0, [])

    def test_it_passes_without_a_step_when_nothing_is_admitted(self) -> None:
        clock = Clock()
        bench = make_bench(clock=clock)
        bench.engine.set_max_num_seqs(0)
        bench.add("waits", "p", deadline_s=101.0)
        assert not bench.engine.has_work
        clock.now_s = 101.0
        assert bench.engine.has_work
        assert bench.run()["waits"].error_code == Reason.DEADLINE_EXCEEDED


def test_a_request_that_never_entered_has_an_output() -> None:
    bench: Bench = make_bench()
    request = EngineRequest("a", SamplingParams(), prompt="")
    refused = bench.engine.refuse(request, RequestRefused("invalid_request", "no"), 1.0)
    assert (refused.finish_reason, refused.error, refused.error_code) == (FinishReason.ERROR, "no", "invalid_request")
    assert bench.engine.aborted(request, 1.0).finish_reason is FinishReason.ABORT
    assert bench.engine.stats().requests_finished == {"error": 1, "abort": 1}
