"""What is reported of tokens: every one of them, once, whatever happens to the request on its way."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch
from engine.fake import FakeModel, fake_token
from engine.fake.sampling import fake_logits
from engine.reporting import LEAST_LOGPROB, shown
from engine.request import FinishReason, TokenLogprob
from kernels.sampling import Sampled, TokenLogprobs
from tests.unit.engine.bench import make_bench, scripted

VOCAB = 262


def expected(tokens: Sequence[int], at: int, count: int) -> tuple[int, float, int, list[int]]:
    """Token `at` of a sequence, its logprob, its rank, and the likeliest: by the fake model's definition."""
    logits = fake_logits((fake_token(tokens[at - 1], at),), VOCAB)
    total = math.log(sum(map(math.exp, logits)))
    order = sorted(range(VOCAB), key=lambda token: (-logits[token], token))
    return tokens[at], logits[tokens[at]] - total, order.index(tokens[at]) + 1, order[:count]


def assert_told(found: TokenLogprob, tokens: Sequence[int], at: int, count: int) -> None:
    token, logprob, rank, top = expected(tokens, at, count)
    assert (found.token_id, found.rank, [one.token_id for one in found.top]) == (token, rank, top)
    assert found.logprob == pytest.approx(logprob)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=5),
    max_tokens=st.integers(0, 12),
    count=st.integers(0, 20),
    pages=st.integers(16, 60),
    budget=st.integers(1, 40),
    seqs=st.integers(1, 5),
)
def test_none_is_lost_to_chunks_preemptions_or_shared_prefixes(
    prompts: list[bytes], max_tokens: int, count: int, pages: int, budget: int, seqs: int
) -> None:
    bench = make_bench(pages=pages, max_num_batched_tokens=budget, max_num_seqs=seqs)
    for number, prompt in enumerate([*prompts, prompts[0]]):
        tokens = tuple(byte if byte != ord("<") else ord("(") for byte in prompt)
        bench.add(str(number), tokens, max_tokens=max_tokens, logprobs=count, prompt_logprobs=20 - count)
    for output in bench.run().values():
        tokens = output.prompt_token_ids + output.token_ids
        prompt = len(output.prompt_token_ids)
        assert output.logprobs is not None
        assert output.prompt_logprobs is not None
        assert len(output.token_ids) == len(output.logprobs) == max_tokens
        assert len(output.prompt_logprobs) == prompt
        assert output.prompt_logprobs[0] is None
        for at, told in enumerate(output.prompt_logprobs[1:], 1):
            assert told is not None
            assert_told(told, tokens, at, 20 - count)
        for at, told in enumerate(output.logprobs, prompt):
            assert_told(told, tokens, at, count)


@pytest.mark.parametrize("pages", [1000, 13])
def test_reporting_changes_no_token(pages: int) -> None:
    params: list[dict[str, Any]] = [{}, {"logprobs": 3}, {"prompt_logprobs": 0}, {"logprobs": 0, "prompt_logprobs": 5}]
    bench = make_bench(pages=pages)
    for number, reported in enumerate(params):
        bench.add(str(number), "the same prompt", max_tokens=12, **reported)
    assert len({output.token_ids for output in bench.run().values()}) == 1


class TestScoring:
    """A request for its prompt's logprobs alone."""

    def test_computes_the_prompt_and_returns(self) -> None:
        bench = make_bench(max_num_batched_tokens=5)
        output = bench.one("a prompt of some length", max_tokens=0, prompt_logprobs=1)
        assert (output.text, output.token_ids, output.finish_reason) == ("", (), FinishReason.LENGTH)
        assert output.prompt_logprobs is not None
        assert [told and told.token for told in output.prompt_logprobs] == [None, *"a prompt of some length"[1:]]
        assert bench.engine.stats().generation_tokens == 0

    def test_a_prompt_as_long_as_the_context_fits(self) -> None:
        """https://github.com/vllm-project/vllm/issues/16445"""
        output = make_bench(max_seq_len=20).one("x" * 20, max_tokens=0, prompt_logprobs=0)
        assert len(output.prompt_logprobs or ()) == 20

    def test_a_prompt_of_one_token_has_nothing_to_tell(self) -> None:
        output = make_bench().one("x", max_tokens=0, prompt_logprobs=5)
        assert (output.prompt_logprobs, output.finish_reason) == ((None,), FinishReason.LENGTH)

    def test_takes_no_shared_prefix_and_is_scored_whole(self) -> None:
        bench = make_bench()
        bench.one("the same prompt again", max_tokens=1)
        output = bench.one("the same prompt again", max_tokens=0, prompt_logprobs=0)
        assert output.metrics.cached_tokens == 0
        assert None not in (output.prompt_logprobs or ())[1:]

    @pytest.mark.in_turn
    def test_an_abort_keeps_what_was_scored(self) -> None:
        bench = make_bench(max_num_batched_tokens=4)
        bench.add("a", "x" * 20, max_tokens=0, prompt_logprobs=0)
        for _ in range(2):
            bench.step()
        bench.engine.abort("a")
        output = bench.run()["a"]
        assert output.finish_reason is FinishReason.ABORT
        assert len(output.prompt_logprobs or ()) == 9

    def test_several_completions_share_one_scoring(self) -> None:
        output = make_bench().one("prompt", n=3, prompt_logprobs=0, logprobs=1, max_tokens=2)
        assert len(output.prompt_logprobs or ()) == 6
        assert [len(choice.logprobs or ()) for choice in output.choices] == [2, 2, 2]


def test_every_token_is_reported_the_one_that_ends_the_text_too() -> None:
    output = make_bench(scripted([97, 98, 256])).one("p", logprobs=1)
    assert [told.token for told in output.logprobs or ()] == ["a", "b", "<|end|>"]
    assert output.text == "ab"


def test_nothing_is_reported_that_was_not_asked_for() -> None:
    output = make_bench().one("prompt")
    assert (output.logprobs, output.prompt_logprobs) == (None, None)
    assert make_bench().one("prompt", logprobs=0).prompt_logprobs is None
    assert make_bench().one("prompt", prompt_logprobs=0).logprobs is None


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_numbers_that_json_lacks_are_never_told(value: float) -> None:
    """https://github.com/vllm-project/vllm/issues/9453"""
    tokenizer = make_bench().engine.tokenizer
    told = shown(tokenizer, TokenLogprobs(0xF0, value, 9, ((97, -0.5), (98, value))))
    assert told.logprob == told.top[1].logprob == LEAST_LOGPROB
    assert (told.token, told.bytes, told.top[0].token) == ("\ufffd", b"\xf0", "a")
    json.dumps([told.logprob, *(one.logprob for one in told.top)], allow_nan=False)


@pytest.mark.parametrize("broken", [None, [], [None]], ids=str)
def test_a_model_that_reports_nothing_fails_the_request(broken: Any) -> None:
    class Silent(FakeModel):
        def execute(self, batch: Batch) -> Sampled:
            told = super().execute(batch)
            return told._replace(logprobs=broken) if told.logprobs is not None else told

    output = make_bench(Silent()).one("p", logprobs=0)
    assert (output.finish_reason, output.error) == (
        FinishReason.ERROR,
        "RuntimeError: the model returned no logprobs for a row that reports them",
    )


def test_logits_that_are_no_numbers_fail_the_request_that_has_them() -> None:
    class Overflowing(FakeModel):
        def execute(self, batch: Batch) -> Sampled:
            told = super().execute(batch)
            reports = [one and one._replace(logprob=math.nan, top=()) for one in told.logprobs or ()]
            return told._replace(logprobs=reports or None)

    bench = make_bench(Overflowing())
    bench.add("reported", "p", logprobs=1)
    bench.add("plain", "q", max_tokens=3)
    bench.run()
    assert bench.outputs["reported"].error == "NoNumbers: the model's logits are no numbers"
    assert len(bench.outputs["plain"].token_ids) == 3
