from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from headrace.contract import Reason
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch
from engine.executor import ModelFailed
from engine.fake import END_ID, FakeModel, fake_text
from engine.request import EngineRequest, FinishReason, RequestRefused, SamplingParams
from kernels.sampling import Sampled
from tests.unit.engine.bench import Bench, Clock, RaisingModel, make_bench, scripted

ENDLESS = {"max_tokens": 500}


def text_of(script: bytes) -> list[int]:
    return list(script)


class TestOutputs:
    """The same tokens, whatever else happens."""

    REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=8)

    @settings(max_examples=60, deadline=None)
    @given(requests=REQUESTS, pages=st.integers(18, 60), budget=st.integers(1, 40), seqs=st.integers(1, 8))
    def test_do_not_depend_on_memory_chunks_or_neighbours(
        self, requests: list[tuple[int, int]], pages: int, budget: int, seqs: int
    ) -> None:
        """https://github.com/vllm-project/vllm/issues/16832, https://github.com/vllm-project/vllm/issues/5952"""
        tight = make_bench(pages=pages, max_num_batched_tokens=budget, max_num_seqs=seqs)
        for number, (prompt, output) in enumerate(requests):
            tight.add(str(number), "p" * prompt, max_tokens=output)
        outputs = tight.run()
        alone = make_bench()
        for number, (prompt, output) in enumerate(requests):
            expected = alone.one("p" * prompt, max_tokens=output)
            found = outputs[str(number)]
            assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
            assert found.finish_reason is FinishReason.LENGTH

    @pytest.mark.parametrize(("pages", "least", "most"), [(1000, 0, 0), (36, 1, 1), (10, 5, 10_000)])
    def test_are_equal_with_none_one_and_many_preemptions(self, pages: int, least: int, most: int) -> None:
        """https://github.com/vllm-project/vllm/issues/16832"""
        bench = make_bench(pages=pages, enable_prefix_caching=False)
        for number in range(6):
            bench.add(str(number), "prompt", max_tokens=20 + number)
        outputs = bench.run()
        assert least <= bench.engine.stats().preemptions <= most
        assert sum(output.metrics.preemptions for output in outputs.values()) == bench.engine.stats().preemptions
        for number in range(6):
            assert outputs[str(number)].text == make_bench().one("prompt", max_tokens=20 + number).text

    def test_each_request_is_admitted_once_even_if_preempted(self) -> None:
        bench = make_bench(pages=10)
        for number in range(4):
            bench.add(str(number), "prompt", max_tokens=20)
        bench.run()
        assert bench.engine.stats().preemptions > 0
        assert sorted(bench.admitted) == ["0", "1", "2", "3"]

    def test_urgent_requests_end_first(self) -> None:
        bench = make_bench(max_num_seqs=1)
        for number, priority in enumerate([6, 6, 0, 3]):
            bench.add(str(number), "prompt", priority=priority)
        assert list(bench.run()) == ["2", "3", "0", "1"]


class TestStopping:
    def test_a_stop_string_that_spans_tokens_leaks_no_part_of_itself(self) -> None:
        """https://github.com/vllm-project/vllm/issues/3672"""
        bench = make_bench(scripted(text_of(b"yes\nUser: no")))
        output = bench.one("p", max_tokens=50, stop="\nUser:")
        assert (output.text, output.finish_reason, output.stop_reason) == ("yes", FinishReason.STOP, "\nUser:")
        assert len(output.token_ids) == len(b"yes\nUser:")

    def test_a_stop_string_may_be_included(self) -> None:
        """https://github.com/vllm-project/vllm/issues/1973"""
        bench = make_bench(scripted(text_of(b"yes. no")))
        output = bench.one("p", stop=(".",), include_stop_str_in_output=True)
        assert (output.text, output.stop_reason) == ("yes.", ".")

    def test_a_stop_string_that_is_never_complete_is_shown(self) -> None:
        """https://github.com/ggml-org/llama.cpp/issues/9867"""
        bench = make_bench(scripted(text_of(b"42</ans")))
        output = bench.one("p", max_tokens=7, stop="</answer>")
        assert (output.text, output.finish_reason, output.stop_reason) == ("42</ans", FinishReason.LENGTH, None)

    def test_a_stop_string_in_the_prompt_stops_nothing(self) -> None:
        bench = make_bench(scripted(text_of(b"bc"), prompt_tokens=2))
        assert bench.one("xa", max_tokens=4, stop="ab").text == "bcbc"

    def test_no_stop_string_fires_before_min_tokens(self) -> None:
        """https://github.com/vllm-project/vllm/issues/21987"""
        bench = make_bench(scripted(text_of(b"a.b.c.d.")))
        for least, text in [(0, "a"), (1, "a"), (2, "a.b"), (4, "a.b.c"), (5, "a.b.c"), (6, "a.b.c.d")]:
            assert bench.one("p", stop=".", min_tokens=least).text == text

    def test_a_stop_string_that_began_before_min_tokens_fires_after(self) -> None:
        bench = make_bench(scripted(text_of(b"a--b")))
        assert bench.one("p", stop="--", min_tokens=2).text == "a"

    def test_no_token_ends_it_before_min_tokens(self) -> None:
        """https://github.com/vllm-project/vllm/issues/21987"""
        all_params: list[dict[str, Any]] = [{}, {"stop_token_ids": (ord("x"),), "ignore_eos": True}]
        for params in all_params:
            wanted = ord("x") if params else END_ID
            bench = make_bench(scripted([wanted]))
            output = bench.one("p", min_tokens=3, **params)
            assert wanted not in output.token_ids[:3]
            assert output.token_ids[3] == wanted
            assert (len(output.token_ids), output.finish_reason) == (4, FinishReason.STOP)

    def test_every_end_of_text_id_counts(self) -> None:
        """https://github.com/vllm-project/vllm/issues/5849"""
        text = replace(fake_text(), eos_token_ids=(END_ID, END_ID + 1))
        for end in text.eos_token_ids:
            output = make_bench(scripted([97, end], text=text)).one("p")
            assert (output.text, output.finish_reason, output.stop_reason) == ("a", FinishReason.STOP, None)
            assert output.token_ids == (97, end)

    def test_ignore_eos_leaves_the_users_stop_ids_in_force(self) -> None:
        """https://github.com/vllm-project/vllm/issues/4589"""
        bench = make_bench(scripted([97, END_ID, 98, 99, 100]))
        output = bench.one("p", ignore_eos=True, stop_token_ids=(99,))
        assert (output.text, output.stop_reason) == ("ab", 99)
        assert bench.one("p", ignore_eos=True, max_tokens=5).text == "abcd"

    def test_a_user_may_list_the_end_of_text_as_a_stop_id_and_ignore_it_as_an_end(self) -> None:
        """https://github.com/vllm-project/vllm/issues/4589"""
        bench = make_bench(scripted([97, END_ID]))
        assert bench.one("p", ignore_eos=True, stop_token_ids=(END_ID,)).stop_reason == END_ID

    def test_the_caller_learns_which_stop_fired(self) -> None:
        """https://github.com/vllm-project/vllm/issues/1973"""
        bench = make_bench(scripted(text_of(b"ab.c")))
        assert bench.one("p", stop=("c", ".")).stop_reason == "."
        assert bench.one("p", stop_token_ids=(98, 99)).stop_reason == 98
        assert bench.one("p").stop_reason is None

    def test_a_stop_id_has_no_text_unless_it_is_to_be_included(self) -> None:
        bench = make_bench(scripted(text_of(b"ab.c")))
        assert bench.one("p", stop_token_ids=(ord("."),)).text == "ab"
        assert bench.one("p", stop_token_ids=(ord("."),), include_stop_str_in_output=True).text == "ab."

    def test_held_text_is_shown_when_a_token_ends_it(self) -> None:
        """https://github.com/ggml-org/llama.cpp/issues/9867"""
        bench = make_bench(scripted([*b"ab", END_ID]))
        assert bench.one("p", stop="bc").text == "ab"

    @pytest.mark.parametrize("prompt", ["p", "<<raise>>"])
    def test_no_tokens_asked_for_is_an_empty_text(self, prompt: str) -> None:
        """https://github.com/GeeeekExplorer/nano-vllm: `max_tokens=0` never stopped."""
        bench = make_bench()
        output = bench.one(prompt, max_tokens=0)
        assert (output.text, output.token_ids, output.finish_reason) == ("", (), FinishReason.LENGTH)
        assert bench.engine.stats().steps == 0

    @given(
        script=st.lists(st.sampled_from(b"ab\n"), min_size=1, max_size=12),
        stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
        max_tokens=st.integers(1, 20),
        data=st.data(),
    )
    def test_text_is_what_a_search_of_the_whole_output_gives(
        self, script: list[int], stops: list[str], max_tokens: int, data: st.DataObject
    ) -> None:
        least = data.draw(st.integers(0, max_tokens))
        output = make_bench(scripted(script)).one("p", max_tokens=max_tokens, min_tokens=least, stop=tuple(stops))
        whole = "".join(chr(script[at % len(script)]) for at in range(max_tokens))
        ends = [end for end in range(least + 1, max_tokens + 1) if any(whole[:end].endswith(stop) for stop in stops)]
        if ends:
            fired = max((stop for stop in stops if whole[: ends[0]].endswith(stop)), key=len)
            assert (output.text, output.stop_reason) == (whole[: ends[0] - len(fired)], fired)
        else:
            assert (output.text, output.stop_reason) == (whole, None)


class TestText:
    def test_characters_are_complete(self) -> None:
        """https://github.com/vllm-project/vllm/issues/8627"""
        bench = make_bench(scripted(list("né🙂".encode())))
        bench.add("a", "p", max_tokens=7)
        seen = [delta.text for _ in range(7) for delta in bench.step().deltas]
        assert seen == ["n", "", "é", "", "", "", "🙂"]

    def test_an_incomplete_character_at_the_end_appears_once(self) -> None:
        """https://github.com/vllm-project/vllm/issues/8627"""
        bench = make_bench(scripted(list("a🙂".encode())))
        assert bench.one("p", max_tokens=4).text == "a\ufffd"

    def test_a_prompt_that_ends_inside_a_character_is_not_shown(self) -> None:
        """https://github.com/vllm-project/vllm/issues/48853"""
        prompt = list("x🙂".encode())[:-2]
        bench = make_bench(scripted([*"🙂".encode()[2:], ord("!")], prompt_tokens=len(prompt)))
        assert bench.one(prompt, max_tokens=3).text == "🙂!"
        assert make_bench(scripted([ord("!")])).one(prompt, max_tokens=3).text == "!!!"


class TestLimits:
    def test_a_request_beyond_the_context_is_refused_with_both_numbers(self) -> None:
        """https://github.com/vllm-project/vllm/issues/765, https://github.com/vllm-project/vllm/issues/1673"""
        bench = make_bench(max_seq_len=20)
        with pytest.raises(RequestRefused, match=r"50 tokens.*20") as refused:
            bench.add("a", "x" * 50)
        assert refused.value.code == Reason.CONTEXT_LENGTH_EXCEEDED
        assert not bench.engine.has_work

    def test_the_last_place_in_the_context_gives_exactly_one_token(self) -> None:
        """https://github.com/vllm-project/vllm/issues/16445"""
        bench = make_bench(max_seq_len=20)
        output = bench.one("x" * 19, max_tokens=10)
        assert (len(output.token_ids), output.finish_reason) == (1, FinishReason.LENGTH)
        with pytest.raises(RequestRefused):
            bench.add("a", "x" * 20)

    def test_max_tokens_is_cut_to_the_context(self) -> None:
        bench = make_bench(max_seq_len=20)
        output = bench.one("x" * 15, max_tokens=10_000)
        assert (len(output.token_ids), output.finish_reason) == (5, FinishReason.LENGTH)

    def test_the_context_is_no_longer_than_the_models_own(self) -> None:
        """https://github.com/sgl-project/sglang/issues/28530"""
        assert make_bench(max_seq_len=500).engine.max_seq_len == 500
        assert make_bench(FakeModel(context_len=300), max_seq_len=500).engine.max_seq_len == 300
        small = make_bench(pages=3)
        assert small.engine.max_seq_len == 12
        assert len(small.one("x" * 4, max_tokens=100).token_ids) == 8
        with pytest.raises(RequestRefused, match=r"13 tokens.*12"):
            small.add("a", "x" * 13)

    @pytest.mark.parametrize(
        ("prompt", "params"),
        [("", {}), ((), {}), ((1, 10**6), {}), ((-1,), {}), ("x", {"stop_token_ids": (10**6,)}), ("\ud800", {})],
    )
    def test_a_bad_request_is_refused_and_its_neighbours_go_on(
        self, prompt: str | tuple[int, ...], params: dict[str, Any]
    ) -> None:
        """https://github.com/vllm-project/vllm/issues/6866"""
        bench = make_bench()
        bench.add("good", "x")
        bench.step()
        with pytest.raises(RequestRefused) as refused:
            bench.add("bad", prompt, **params)
        assert refused.value.code == Reason.INVALID_REQUEST
        assert list(bench.run()) == ["good"]

    def test_a_chat_is_templated_and_a_refusal_is_the_templates(self) -> None:
        bench = make_bench()
        bench.engine.add(EngineRequest("a", SamplingParams(), messages=({"role": "user", "content": "hi"},)))
        ids = bench.run()["a"].prompt_token_ids
        assert ids == tuple(bench.engine.tokenizer.encode_prompt("<|user|>hi<|end|><|assistant|>"))
        text = replace(fake_text(), chat_template="{{ raise_exception('no') }}")
        with pytest.raises(RequestRefused, match="no") as refused:
            make_bench(FakeModel(text=text)).engine.add(
                EngineRequest("a", SamplingParams(), messages=({"role": "user", "content": "hi"},))
            )
        assert refused.value.code == Reason.TEMPLATE_ERROR

    def test_an_id_in_use_is_refused(self) -> None:
        bench = make_bench()
        bench.add("a", "x")
        with pytest.raises(ValueError, match="in the engine already"):
            bench.add("a", "x")


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

    def test_keeps_what_was_held_back_for_a_stop(self) -> None:
        bench = make_bench(scripted(text_of(b"ab</")))
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
        bench = make_bench(pages=pages, max_num_seqs=seqs, max_num_batched_tokens=budget)
        count = data.draw(st.integers(1, 8))
        for number in range(count):
            prompt = data.draw(st.sampled_from(["p", "long prompt of some pages", "<<raise:2>>", "<<eos:3>>"]))
            bench.add(
                str(number), prompt, priority=data.draw(st.integers(0, 1)), max_tokens=data.draw(st.integers(0, 10))
            )
            for _ in range(data.draw(st.integers(0, 4))):
                bench.step()
            bench.engine.abort(str(data.draw(st.integers(0, count))))
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


class TestShortage:
    """A device or a host without memory for a step."""

    def model(self, most_tokens: int, error: Exception) -> FakeModel:
        class Tight(FakeModel):
            def execute(self, batch: Batch) -> Sampled:
                if len(batch.token_ids) > most_tokens:
                    raise error
                return super().execute(batch)

        return Tight()

    class OutOfMemoryError(RuntimeError):
        """As torch names it."""

    ERRORS = (MemoryError(), OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory"))

    @pytest.mark.parametrize("error", ERRORS, ids=["host", "device", "torch on a host"])
    def test_smaller_steps_are_made_and_nobody_fails(self, error: Exception) -> None:
        bench = make_bench(self.model(10, error), max_num_batched_tokens=64)
        for number in range(3):
            bench.add(str(number), "p" * 40, max_tokens=5)
        outputs = bench.run()
        expected = make_bench().one("p" * 40, max_tokens=5)
        assert [output.token_ids for output in outputs.values()] == [expected.token_ids] * 3

    def test_the_one_that_cannot_fit_even_alone_fails(self) -> None:
        class Tight(FakeModel):
            def execute(self, batch: Batch) -> Sampled:
                if any(7 in tokens for tokens in batch.known_tokens):
                    raise MemoryError
                return super().execute(batch)

        bench = make_bench(Tight())
        for number in range(4):
            bench.add(str(number), (7, 8) if number == 2 else (8, 8), max_tokens=3)
        outputs = bench.run()
        assert {name for name, output in outputs.items() if output.error} == {"2"}

    def test_the_budget_recovers(self) -> None:
        bench = make_bench(RaisingModel(lambda batch: len(batch.token_ids) > 40 and model_is_short()))
        short = [True]

        def model_is_short() -> bool:
            if short:
                short.pop()
                raise MemoryError
            return False

        bench.add("a", "p" * 50, max_tokens=200)
        bench.add("b", "p" * 50, max_tokens=200)
        bench.step()
        assert bench.engine._scheduler.budget.tokens == 512
        bench.run()
        assert bench.engine._scheduler.budget.tokens == 1024


class TestFailure:
    @pytest.mark.parametrize("marked", range(5))
    def test_the_request_at_fault_fails_alone(self, marked: int) -> None:
        """https://github.com/vllm-project/vllm/issues/6866"""
        bench = make_bench()
        for number in range(5):
            bench.add(str(number), "<<raise:4>>" if number == marked else "a prompt...", max_tokens=9)
        outputs = bench.run()
        failed = outputs.pop(str(marked))
        assert (failed.finish_reason, failed.error_code) == (FinishReason.ERROR, Reason.ENGINE_ERROR)
        assert failed.error == "RuntimeError: the prompt asked for this error"
        assert len(failed.token_ids) == 4
        expected = make_bench().one("a prompt...", max_tokens=9).text
        assert [output.text for output in outputs.values()] == [expected] * 4

    def test_several_at_fault_fail_and_the_rest_goes_on(self) -> None:
        bench = make_bench()
        for number in range(9):
            bench.add(str(number), "<<raise>>" if number in (0, 3, 4) else "a prompt")
        outputs = bench.run()
        assert {name for name, output in outputs.items() if output.error} == {"0", "3", "4"}

    def test_a_lone_request_at_fault_leaves_the_engine_usable(self) -> None:
        bench = make_bench()
        assert bench.one("<<raise>>").finish_reason is FinishReason.ERROR
        assert bench.one("a prompt").finish_reason is FinishReason.LENGTH

    def test_a_fault_of_one_moment_harms_nobody(self) -> None:
        calls = iter([False, False, True])
        bench = make_bench(RaisingModel(lambda _batch: next(calls, False)))
        for number in range(4):
            bench.add(str(number), "a prompt")
        assert {output.finish_reason for output in bench.run().values()} == {FinishReason.LENGTH}

    def test_the_request_at_fault_is_found_in_few_tries(self) -> None:
        model = RaisingModel(lambda batch: any(7 in tokens for tokens in batch.known_tokens))
        bench = make_bench(model)
        for number in range(64):
            bench.add(str(number), (7,) if number == 40 else (8,), max_tokens=1)
        bench.run()
        assert model.calls == 1 + 2 * math.log2(64)

    def test_a_model_that_runs_nothing_any_more_is_said_to_be_broken(self) -> None:
        bench = make_bench(RaisingModel(lambda _batch: True))
        bench.add("a", "a prompt")
        with pytest.raises(ModelFailed, match="RuntimeError: out of order"):
            bench.engine.step()
        result = bench.engine.abandon("given up")
        assert [output.finish_reason for output in result.finished] == [FinishReason.ERROR]
        assert not bench.engine.has_work

    def test_abandon_fails_whoever_runs_or_waits(self) -> None:
        bench = make_bench(max_num_seqs=1)
        bench.add("runs", "a prompt", **ENDLESS)
        bench.add("waits", "a prompt")
        bench.step()
        result = bench.engine.abandon("given up")
        assert {output.request_id: output.error for output in result.finished} == {
            "runs": "given up",
            "waits": "given up",
        }
        assert {output.error_code for output in result.finished} == {Reason.ENGINE_ERROR}
        stats = bench.engine.stats()
        assert (stats.running, stats.waiting, stats.pages_free) == (0, 0, 1000)

    @pytest.mark.parametrize("answer", [[], [5, 5], [-1], [10**6]])
    def test_an_answer_without_meaning_is_an_error_and_not_a_token(self, answer: list[int]) -> None:
        """https://github.com/vllm-project/vllm/issues/13175"""

        class Wrong(FakeModel):
            def execute(self, batch: Batch) -> Sampled:
                return Sampled(answer if batch.known_tokens[0] != [0] else [0])

        output = make_bench(Wrong()).one((5,))
        assert (output.finish_reason, output.token_ids) == (FinishReason.ERROR, ())


class TestSampling:
    def seeds_seen(self, *seeds: int | None) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []

        class Watched(FakeModel):
            def execute(self, batch: Batch) -> Sampled:
                seen.append(batch.sampling.seed)
                return super().execute(batch)

        bench = make_bench(Watched())
        for number, seed in enumerate(seeds):
            bench.add(str(number), "p", max_tokens=3, seed=seed, temperature=1.0)
        bench.run()
        return seen

    def test_a_seed_is_kept_beside_a_neighbour_without_one(self) -> None:
        """https://github.com/vllm-project/vllm/issues/51226"""
        assert {row[1] for row in self.seeds_seen(None, 42)} == {42}

    def test_a_seed_is_drawn_once_if_none_is_given(self) -> None:
        [first] = {row[0] for row in self.seeds_seen(None)}
        [second] = {row[0] for row in self.seeds_seen(None)}
        assert 0 <= first < 2**63
        assert first != second


class TestMetrics:
    def test_moments_are_in_order_and_batch_sizes_are_those_of_the_steps(self) -> None:
        bench = make_bench()
        bench.add("a", "p", max_tokens=6)
        bench.step()
        bench.step()
        bench.add("b", "p", max_tokens=2)
        outputs = bench.run()
        for output in outputs.values():
            metrics = output.metrics
            moments = [
                metrics.arrived_s, metrics.admitted_s, metrics.first_token_s, metrics.last_token_s, metrics.finished_s
            ]  # fmt: skip
            assert None not in moments
            assert moments == sorted(moments)  # type: ignore[type-var]
        assert (outputs["a"].metrics.mean_batch_size, outputs["a"].metrics.max_batch_size) == (8 / 6, 2)
        assert (outputs["b"].metrics.mean_batch_size, outputs["b"].metrics.max_batch_size) == (2.0, 2)

    def test_stats_count_what_happened(self) -> None:
        bench = make_bench(max_num_seqs=2)
        for number in range(3):
            bench.add(str(number), f"prompt{number}"[::-1], max_tokens=4)
        stats = bench.engine.stats()
        assert (stats.running, stats.waiting, stats.max_num_seqs, stats.pages_total) == (0, 3, 2, 1000)
        bench.step()
        stats = bench.engine.stats()
        assert (stats.running, stats.waiting, stats.steps, stats.prompt_tokens) == (2, 1, 1, 14)
        bench.run()
        stats = bench.engine.stats()
        assert (stats.prompt_tokens, stats.generation_tokens, stats.max_batch_size) == (21, 12, 2)
        assert stats.requests_finished == {"length": 3}

    def test_the_admission_cap_can_be_changed(self) -> None:
        bench = make_bench(max_num_seqs=4)
        bench.engine.set_max_num_seqs(0)
        bench.add("a", "p")
        assert not bench.engine.has_work
        bench.engine.set_max_num_seqs(1)
        assert bench.run()["a"].finish_reason is FinishReason.LENGTH


def test_a_request_that_never_entered_has_an_output() -> None:
    bench: Bench = make_bench()
    request = EngineRequest("a", SamplingParams(), prompt="")
    refused = bench.engine.refuse(request, RequestRefused("invalid_request", "no"), 1.0)
    assert (refused.finish_reason, refused.error, refused.error_code) == (FinishReason.ERROR, "no", "invalid_request")
    assert bench.engine.aborted(request, 1.0).finish_reason is FinishReason.ABORT
    assert bench.engine.stats().requests_finished == {"error": 1, "abort": 1}
