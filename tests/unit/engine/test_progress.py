"""A request that was taken over goes on from the tokens it had, and comes to what it would have come to undisturbed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch
from engine.fake import END_ID, FakeModel
from engine.request import Choice, EngineRequest, FinishReason, Progress, RequestOutput, SamplingParams, TokenDelta
from kernels.sampling import Sampled
from tests.unit.engine.bench import Bench, make_bench, scripted

EURO = "€uro "
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}


class SeededModel(FakeModel):
    """The next token depends on the row's seed and position, and on everything before it."""

    def execute(self, batch: Batch) -> Sampled:
        rows = list(zip(batch.sampling.seed, batch.sampling.position, strict=True))
        told = super().execute(batch)
        tokens = [97 + (seed * 31 + at * 7 + t) % 26 for (seed, at), t in zip(rows, told.tokens, strict=True)]
        return Sampled(tokens, told.logprobs)


def euro() -> FakeModel:
    return scripted(EURO.encode(), prompt_tokens=6)


def ending() -> FakeModel:
    return scripted([*b"some words", END_ID, *b"more"], prompt_tokens=6)


CASES: dict[str, tuple[Callable[[], FakeModel], dict[str, Any]]] = {
    "greedy": (FakeModel, {"max_tokens": 12}),
    "seeded": (SeededModel, {"max_tokens": 12, "temperature": 1.0, "seed": 3}),
    "several completions": (SeededModel, {"max_tokens": 6, "temperature": 1.0, "seed": 3, "n": 3}),
    "characters of three bytes": (euro, {"max_tokens": 17}),
    "a stop string": (euro, {"max_tokens": 40, "stop": ("o €uro €ur",)}),
    "a stop string that is kept": (euro, {"max_tokens": 40, "stop": ("o €",), "include_stop_str_in_output": True}),
    "a stop before min_tokens": (euro, {"max_tokens": 40, "stop": ("uro",), "min_tokens": 12}),
    "the end of the text": (ending, {"max_tokens": 30}),
    "an end before min_tokens": (ending, {"max_tokens": 30, "min_tokens": 14}),
    "a stop token": (ending, {"max_tokens": 30, "stop_token_ids": (ord("w"),), "include_stop_str_in_output": True}),
    "logprobs": (FakeModel, {"max_tokens": 8, "logprobs": 3}),
    "the prompt's logprobs too": (FakeModel, {"max_tokens": 8, "logprobs": 1, "prompt_logprobs": 2}),
    "penalties": (FakeModel, {"max_tokens": 12, "repetition_penalty": 1.7, "frequency_penalty": 1.5}),
    "bad words": (euro, {"max_tokens": 20, "bad_words": ("ro",)}),
    "a grammar": (FakeModel, {"max_tokens": 40, "guided_regex": "[a-m]{3}(-[n-z]{2}){2}", "logprobs": 0}),
    "a schema": (
        FakeModel,
        {"max_tokens": 40, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ),
}  # fmt: skip


def told(output: RequestOutput) -> list[Choice]:
    """What a request is known by, whatever way it took."""
    return [replace(choice) for choice in output.choices]


def cut(choice: Choice, tokens: int) -> Progress:
    """A completion's first tokens."""
    scores = choice.logprobs[:tokens] if choice.logprobs is not None else ()
    return Progress(choice.token_ids[:tokens], scores, choice.index)


def resume(bench: Bench, progress: tuple[Progress, ...], params: dict[str, Any]) -> RequestOutput:
    request = EngineRequest("r", SamplingParams(**{"temperature": 0.0, **params}), "prompt", progress=progress)
    bench.engine.add(request)
    return bench.run()["r"]


@pytest.mark.parametrize("name", CASES)
def test_every_cut_comes_to_the_undisturbed_end(name: str) -> None:
    model, params = CASES[name]
    whole = make_bench(model()).one("prompt", **params)
    assert len(whole.token_ids) > 4
    for tokens in range(max(len(choice.token_ids) for choice in whole.choices) + 1):
        bench = make_bench(model())
        output = resume(bench, tuple(cut(choice, tokens) for choice in whole.choices), params)
        assert told(output) == told(whole), f"cut after {tokens} tokens"
        assert output.prompt_logprobs == whole.prompt_logprobs
        assert output.stop_reason == whole.stop_reason
        assert bench.streamed("r") == (whole.text, whole.token_ids)  # the deltas begin at 0 and leave no gap


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=4),
    pages=st.integers(9, 30),
    budget=st.integers(1, 30),
    caching=st.booleans(),
)
def test_memory_chunks_and_neighbours_change_nothing(
    requests: list[tuple[int, int, int]], pages: int, budget: int, caching: bool
) -> None:
    bench = make_bench(SeededModel(), pages=pages, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    undisturbed = {}
    for number, (prompt, length, tokens) in enumerate(requests):
        params = SamplingParams(max_tokens=length, temperature=1.0, seed=number)
        whole = make_bench(SeededModel()).one("p" * prompt, max_tokens=length, temperature=1.0, seed=number)
        undisturbed[str(number)] = whole
        progress = (cut(whole.choices[0], tokens),)
        bench.engine.add(EngineRequest(str(number), params, "p" * prompt, progress=progress))
    outputs = bench.run()
    assert {key: told(output) for key, output in outputs.items()} == {
        key: told(output) for key, output in undisturbed.items()
    }
    assert all(output.metrics.cached_tokens <= len(output.prompt_token_ids) for output in outputs.values())


@pytest.mark.in_turn
def test_the_first_delta_repeats_what_there_was() -> None:
    whole = make_bench(euro()).one("prompt", max_tokens=12, logprobs=1)
    bench = make_bench(euro())
    params = SamplingParams(max_tokens=12, logprobs=1, temperature=0.0)
    bench.engine.add(EngineRequest("r", params, "prompt", progress=(cut(whole.choices[0], 9),)))
    deltas = bench.step().deltas
    assert whole.logprobs is not None
    assert deltas[0] == TokenDelta("r", "€uro ", 0, whole.token_ids[:9], 0, 0, whole.logprobs[:9])
    assert (deltas[1].position, deltas[1].offset) == (9, 5)
    assert deltas[1].logprobs == (whole.logprobs[9],)


def test_what_was_all_there_needs_no_step() -> None:
    whole = make_bench().one("prompt", max_tokens=5, n=2)
    bench = make_bench()
    output = resume(bench, tuple(cut(choice, 5) for choice in whole.choices), {"max_tokens": 5, "n": 2})
    assert told(output) == told(whole)
    assert (bench.engine.stats().steps, bench.admitted) == (0, [])
    assert output.finish_reason is FinishReason.LENGTH


def test_only_new_tokens_count_as_generated() -> None:
    bench = make_bench()
    whole = make_bench().one("prompt", max_tokens=8)
    resume(bench, (cut(whole.choices[0], 6),), {"max_tokens": 8})
    assert bench.engine.stats().generation_tokens == 2


@pytest.mark.parametrize(
    "progress",
    [
        Progress((1, 2, 99999)),
        Progress((-1,)),
        Progress(tuple(range(97, 110))),  # more than max_tokens
        Progress((97, END_ID, 98)),  # goes on after its end
        Progress((97, 98), index=1),  # of a completion that wasn't asked for
        Progress((97,), logprobs=make_bench().one("p", max_tokens=1, logprobs=0).logprobs or ()),
    ],
)
def test_what_cannot_be_its_progress_is_left_out(progress: Progress) -> None:
    whole = make_bench().one("prompt", max_tokens=8)
    bench = make_bench()
    assert told(resume(bench, (progress,), {"max_tokens": 8})) == told(whole)
    assert bench.streamed("r") == (whole.text, whole.token_ids)


def test_progress_against_the_grammar_is_left_out() -> None:
    params = {"max_tokens": 8, "guided_regex": "[a-c]{6}"}
    whole = make_bench().one("prompt", **params)
    assert told(resume(make_bench(), (Progress(tuple(b"abz")),), params)) == told(whole)


def test_an_abort_keeps_what_there_was_before() -> None:
    whole = make_bench(euro()).one("prompt", max_tokens=12)
    bench = make_bench(euro())
    params = SamplingParams(max_tokens=12, temperature=0.0)
    bench.engine.add(EngineRequest("r", params, "prompt", progress=(cut(whole.choices[0], 8),)))
    bench.engine.abort("r")
    output = bench.run()["r"]
    assert (output.text, output.finish_reason) == ("€uro \ufffd", FinishReason.ABORT)
    assert output.token_ids == whole.token_ids[:8]
