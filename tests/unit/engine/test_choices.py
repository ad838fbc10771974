"""Several completions of one prompt: one request, one output, whatever becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch
from engine.fake import FakeModel
from engine.request import FinishReason, RequestOutput
from kernels.sampling import Sampled, choice_seed
from tests.unit.engine.bench import Bench, Clock, make_bench


class SeededModel(FakeModel):
    """The next token depends on the row's seed and position alone; `broken` raises for a seed at a position."""

    def __init__(self, broken: tuple[int, int] | None = None) -> None:
        super().__init__()
        self._broken = broken

    def execute(self, batch: Batch) -> Sampled:
        sampling = batch.sampling
        rows = list(zip(sampling.seed, sampling.position, strict=True))
        if self._broken in rows:
            raise RuntimeError("this seed is broken")
        told = super().execute(batch)
        return Sampled([97 + (seed * 31 + position * 7) % 26 for seed, position in rows], told.logprobs)


def texts(output: RequestOutput) -> list[str]:
    return [choice.text for choice in output.choices]


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_completions_stand_in_order_each_with_its_own_seed(n: int) -> None:
    output = make_bench(SeededModel()).one("prompt", n=n, seed=7, max_tokens=6)
    alone = [
        make_bench(SeededModel()).one("prompt", seed=choice_seed(7, index), max_tokens=6).text for index in range(n)
    ]
    assert texts(output) == alone
    assert [choice.index for choice in output.choices] == list(range(n))
    assert {choice.finish_reason for choice in output.choices} == {FinishReason.LENGTH}
    assert (output.text, output.finish_reason) == (alone[0], FinishReason.LENGTH)
    assert n == 1 or len(set(alone)) > 1


def test_the_request_is_admitted_and_counted_once() -> None:
    bench = make_bench()
    bench.add("a", "prompt", n=3)
    bench.run()
    assert bench.admitted == ["a"]
    stats = bench.engine.stats()
    assert (stats.requests_finished, stats.prompt_tokens, stats.generation_tokens) == ({"length": 1}, 6, 24)


@settings(max_examples=50, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=4),
    pages=st.integers(10, 40),
    seqs=st.integers(1, 6),
    budget=st.integers(1, 30),
)
def test_memory_chunks_and_neighbours_change_nothing(
    requests: list[tuple[int, int, int]], pages: int, seqs: int, budget: int
) -> None:
    tight = make_bench(SeededModel(), pages=pages, max_num_seqs=seqs, max_num_batched_tokens=budget)
    for number, (prompt, n, output) in enumerate(requests):
        tight.add(str(number), "p" * prompt, n=n, seed=number, max_tokens=output)
    outputs = tight.run()
    for number, (prompt, n, output) in enumerate(requests):
        whole = make_bench(SeededModel()).one("p" * prompt, n=n, seed=number, max_tokens=output)
        assert texts(outputs[str(number)]) == texts(whole)


def test_completions_end_each_for_itself() -> None:
    """One at its stop, one at its length; the request when both have."""
    bench = make_bench(SeededModel())
    whole = texts(bench.one("prompt", n=2, seed=1, max_tokens=9))
    stop = next(pair for pair in (whole[1][i : i + 2] for i in range(8)) if pair not in whole[0])
    output = make_bench(SeededModel()).one("prompt", n=2, seed=1, max_tokens=9, stop=stop)
    assert [choice.finish_reason for choice in output.choices] == [FinishReason.LENGTH, FinishReason.STOP]
    assert [choice.stop_reason for choice in output.choices] == [None, stop]
    assert texts(output) == [whole[0], whole[1][: whole[1].index(stop)]]


class TestEndsOfTheWhole:
    @pytest.mark.parametrize("steps", range(12))
    def test_an_abort_ends_all_and_keeps_what_they_had(self, steps: int) -> None:
        """https://github.com/sgl-project/sglang/issues/1674"""
        bench = make_bench(SeededModel(), max_num_seqs=2)
        bench.add("a", "prompt", n=3, seed=1, max_tokens=4)
        bench.add("b", "prompt", n=2, seed=2, max_tokens=4)
        for _ in range(steps):
            bench.step()
        done = "a" in bench.outputs
        had = [bench.streamed("a", index)[1] for index in range(3)]
        bench.engine.abort("a")
        bench.engine.abort("a")
        bench.engine.check()
        output = bench.run()["a"]
        whole = make_bench(SeededModel()).one("prompt", n=3, seed=1, max_tokens=4)
        assert all(full.startswith(text) for text, full in zip(texts(output), texts(whole), strict=True))
        assert output.finish_reason is (FinishReason.LENGTH if done else FinishReason.ABORT)
        if not done:
            assert bench.engine.stats().requests_finished["abort"] == 1
            assert [choice.token_ids for choice in output.choices] == had
            reasons = [FinishReason.LENGTH if len(tokens) == 4 else FinishReason.ABORT for tokens in had]
            assert [choice.finish_reason for choice in output.choices] == reasons
        assert texts(bench.outputs["b"]) == texts(make_bench(SeededModel()).one("prompt", n=2, seed=2, max_tokens=4))

    @pytest.mark.parametrize("index", range(3))
    def test_one_that_fails_fails_the_request_and_harms_no_other(self, index: int) -> None:
        broken = SeededModel(broken=(choice_seed(1, index), 6 + 2))
        bench = make_bench(broken)
        bench.add("a", "prompt", n=3, seed=1, max_tokens=9)
        bench.add("b", "prompt", n=2, seed=2, max_tokens=9)
        outputs = bench.run()
        output = outputs["a"]
        assert (output.finish_reason, output.error) == (FinishReason.ERROR, "RuntimeError: this seed is broken")
        reasons = [choice.finish_reason for choice in output.choices]
        assert reasons[index] is FinishReason.ERROR
        assert {reason for i, reason in enumerate(reasons) if i != index} == {FinishReason.ABORT}
        assert outputs["b"].finish_reason is FinishReason.LENGTH
        assert bench.engine.stats().requests_finished == {"error": 1, "length": 1}

    def test_a_deadline_ends_all(self) -> None:
        clock = Clock()
        bench = make_bench(SeededModel(), clock=clock, max_num_seqs=2)
        bench.add("a", "prompt", n=3, max_tokens=50, deadline_s=clock.now_s + 5)
        bench.step()
        clock.now_s += 10
        output = bench.run()["a"]
        assert (output.finish_reason, output.error_code) == (FinishReason.ABORT, "deadline_exceeded")
        assert {choice.finish_reason for choice in output.choices} == {FinishReason.ABORT}

    def test_an_engine_that_is_given_up_fails_all(self) -> None:
        bench = make_bench(SeededModel())
        bench.add("a", "prompt", n=3, max_tokens=50)
        bench.step()
        [output] = bench.engine.abandon("given up").finished
        assert (output.finish_reason, output.error, len(output.choices)) == (FinishReason.ERROR, "given up", 3)


@pytest.mark.parametrize("ids", [("a", "1:a"), ("0:a", "a"), ("1:a", "0:1:a")])
def test_ids_that_look_like_those_of_completions_are_requests_of_their_own(ids: tuple[str, str]) -> None:
    bench = make_bench(SeededModel())
    for number, request_id in enumerate(ids):
        bench.add(request_id, "prompt", n=2, seed=number)
    outputs = bench.run()
    for number, request_id in enumerate(ids):
        assert texts(outputs[request_id]) == texts(make_bench(SeededModel()).one("prompt", n=2, seed=number))


def test_no_tokens_asked_for_gives_empty_completions() -> None:
    output = make_bench().one("prompt", n=3, max_tokens=0)
    assert (texts(output), output.finish_reason) == (["", "", ""], FinishReason.LENGTH)


def test_the_prompt_is_computed_once() -> None:
    computed: list[int] = []

    class Counting(FakeModel):
        def execute(self, batch: Batch) -> Sampled:
            computed.append(len(batch.token_ids))
            return super().execute(batch)

    make_bench(Counting()).one("p" * 400, n=4, max_tokens=2)
    assert sum(computed) < 400 + 4 * 8


def test_times_and_steps_are_those_of_all() -> None:
    bench: Bench = make_bench(max_num_seqs=2)
    metrics: Any = bench.one("prompt", n=2, max_tokens=3).metrics
    assert metrics.arrived_s <= metrics.admitted_s <= metrics.first_token_s <= metrics.last_token_s
    assert (metrics.max_batch_size, metrics.preemptions) == (2, 0)
