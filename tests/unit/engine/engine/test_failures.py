"""Steps that fail, for want of memory or for another reason."""

from __future__ import annotations

import math
from typing import Any

import pytest
from headrace.contract import Reason

from engine.batch import Batch
from engine.executor import ModelFailed
from engine.fake import FakeModel, fake_token
from engine.request import FinishReason
from kernels.sampling import Sampled
from tests.unit.engine.bench import ENDLESS, Bench, RaisingModel, expected, make_bench


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

    @pytest.mark.in_turn
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

    def test_the_request_at_fault_is_found_in_few_tries(self, overlap: bool) -> None:
        model = RaisingModel(lambda batch: any(7 in tokens for tokens in batch.known_tokens))
        bench = make_bench(model)
        for number in range(64):
            bench.add(str(number), (7,) if number == 40 else (8,), max_tokens=1)
        bench.run()
        assert model.calls == 1 + overlap + 2 * math.log2(64), "a step that was under way is tried once more"

    def test_a_model_that_runs_nothing_any_more_is_said_to_be_broken(self) -> None:
        bench = make_bench(RaisingModel(lambda _batch: True))
        bench.add("a", "a prompt")
        with pytest.raises(ModelFailed, match="RuntimeError: out of order"):
            bench.run()
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


class TestTokenizer:
    """A tokenizer that can't tell what a token's text is."""

    @pytest.fixture
    def bench(self, monkeypatch: pytest.MonkeyPatch) -> Bench:
        """No question mark has a text; whoever comes to position 5 gets one."""
        bench = make_bench(FakeModel(choose=lambda token, at: ord("?") if at == 5 else fake_token(token, at)))
        pieces = bench.engine.tokenizer.pieces
        text_of = pieces._bytes

        def broken(token_id: int) -> bytes:
            if token_id == ord("?"):
                raise ValueError("no such token")
            return text_of(token_id)

        monkeypatch.setattr(pieces, "_bytes", broken)
        return bench

    @pytest.mark.parametrize("asked", [{}, {"logprobs": 2}, {"stop": ["xyz"]}, {"n": 3}], ids=str)
    def test_its_request_fails_alone_and_keeps_what_it_had(self, bench: Bench, asked: dict[str, Any]) -> None:
        bench.add("fails", "abc", **asked)
        bench.add("goes on", "a longer prompt", **asked)
        outputs = bench.run()
        failed = outputs["fails"]
        assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, "ValueError: no such token")
        assert failed.token_ids == expected("abc", 2)
        assert len(failed.logprobs or ()) == (2 if "logprobs" in asked else 0)
        assert outputs["goes on"].token_ids == expected("a longer prompt", 8)

    def test_so_does_one_whose_prompt_cannot_be_reported(self, bench: Bench) -> None:
        bench.add("fails", "a?bcdefghijk", prompt_logprobs=1)
        bench.add("goes on", "a longer prompt")
        outputs = bench.run()
        assert outputs["fails"].error == "ValueError: no such token"
        assert outputs["goes on"].token_ids == expected("a longer prompt", 8)
