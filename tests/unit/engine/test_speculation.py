"""Guessed tokens: which are guessed, and that they change nothing but the number of steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.endurance.random_model import write_random_model
from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake import FakeModel
from engine.model import load_model
from engine.request import EngineRequest, FinishReason, RequestOutput, SamplingParams
from engine.speculation import LEAST_TRUST_CHEAP, LEAST_TRUST_DEAR, PromptLookup
from tests.conftest import ROOT
from tests.unit.engine.bench import Bench, make_bench
from tests.unit.kernels.isas import needs_library

LOOP = b"abcdefg"
FORMS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
]


@dataclass(frozen=True)
class Said:
    """All answers, and how they came about."""

    tokens: dict[str, tuple[int, ...]]
    drafted: int
    accepted: int
    cached: int
    """Tokens of the repeated prompt that were found computed."""


def loop(token: int, _position: int) -> int:
    """Goes round for ever."""
    return LOOP[(LOOP.find(token) + 1) % len(LOOP)]


def a_bench(most: int, choose: Any = loop, cheap_rows: int = 4, **config: Any) -> Bench:
    return make_bench(FakeModel(choose=choose, cheap_rows=cheap_rows), num_speculative_tokens=most, **config)


def test_what_followed_last_time_is_guessed() -> None:
    lookup = PromptLookup()
    assert lookup.guess([1, 2, 3, 4, 5, 6, 1, 2, 3], 2) == [4, 5]
    assert lookup.guess([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], 9) == [5, 6, 1, 2, 3, 4, 5, 6, 1]
    assert lookup.guess([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 9], 2) == []


def test_nothing_is_guessed_that_two_places_disagree_about() -> None:
    tokens = [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6, 0, 1, 2, 3]
    assert PromptLookup().guess(tokens, 4) == [4]


def test_trust_follows_what_comes() -> None:
    lookup = PromptLookup()
    tokens = [1, 2, 3, 1, 2, 3]
    for _ in range(20):
        guess = lookup.guess(tokens, 3)
        tokens += guess
        lookup.judge(guess)
    assert lookup.trust > LEAST_TRUST_DEAR
    for _ in range(20):
        lookup.guess(tokens, 3)
        lookup.judge([0, 0, 0])
    assert lookup.trust < LEAST_TRUST_CHEAP


def test_guesses_that_come_true_save_steps_and_change_nothing() -> None:
    plain, guessing = a_bench(0), a_bench(4)
    assert guessing.one("abcab", max_tokens=100).token_ids == plain.one("abcab", max_tokens=100).token_ids
    stats = guessing.engine.stats()
    assert stats.generation_tokens == 100
    assert stats.accepted_tokens > 60
    assert stats.accepted_tokens <= stats.drafted_tokens
    assert stats.steps == 100 - stats.accepted_tokens
    assert plain.engine.stats().drafted_tokens == 0


def test_guesses_that_fail_are_given_up() -> None:
    """A text that goes on otherwise at each return: it costs a few rows and no step."""
    bench = a_bench(4, choose=lambda token, at: ord("abc"[at % 4]) if at % 4 < 3 else at % 97)
    bench.one("abcdabcd", max_tokens=200)
    assert bench.engine.stats().drafted_tokens < 40


def test_a_model_that_does_not_want_guesses_gets_none() -> None:
    bench = a_bench(4, cheap_rows=0)
    bench.one("abcabcabc", max_tokens=50)
    assert bench.engine.stats().drafted_tokens == 0


@pytest.mark.parametrize("max_tokens", range(1, 24))
def test_the_last_token_is_the_last(max_tokens: int) -> None:
    bench = a_bench(4, max_seq_len=40)
    output = bench.one("abcdefgabcdefg", max_tokens=max_tokens)
    assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, max_tokens)


@pytest.mark.parametrize("at", range(len(LOOP)))
def test_what_comes_after_a_stop_is_dropped(at: int) -> None:
    """https://github.com/vllm-project/vllm/issues/16832: a stop in the midst of accepted tokens"""
    stop = LOOP[at : at + 1].decode()
    for params in ({"stop": (stop,)}, {"stop_token_ids": (LOOP[at],)}):
        for min_tokens in (0, 30):
            told = []
            for most in (0, 4):
                output = a_bench(most).one("abcdefg" * 3, max_tokens=60, min_tokens=min_tokens, **params)
                told.append((output.text, output.token_ids, output.finish_reason, output.stop_reason))
            assert told[0] == told[1]
            assert told[0][2] is FinishReason.STOP


def test_requests_with_rules_and_reports_are_not_guessed() -> None:
    for params in ({"repetition_penalty": 1.1}, {"logprobs": 2}, {"logit_bias": {97: 1.0}}):
        bench = a_bench(4)
        bench.one("abcdefg" * 3, max_tokens=30, **params)
        assert bench.engine.stats().drafted_tokens == 0


def test_a_guess_takes_nobodys_page_and_no_more_than_the_budget() -> None:
    bench = a_bench(4, pages=24, max_seq_len=60, max_num_batched_tokens=8)
    for number in range(6):
        bench.add(str(number), "abcdefg" * 2, max_tokens=40)
    outputs = bench.run()
    assert {output.text for output in outputs.values()} == {("abcdefg" * 8)[:40]}
    assert bench.engine.stats().accepted_tokens > 0


def said(most: int, crowds: Sequence[Sequence[int]], prompts: Sequence[tuple[int, ...]], **config: Any) -> Said:
    """What a model says to prompts, a crowd after the other, and after the first to it with half of its answer."""
    config = {"threads": 2, "max_seq_len": 384, "kv_cache_bytes": 2**25, "num_speculative_tokens": most, **config}
    asked = EngineConfig(**config)
    engine = Engine(load_model(asked), asked)
    found: dict[str, RequestOutput] = {}

    def run(name: str, prompt: tuple[int, ...], **params: Any) -> None:
        engine.add(EngineRequest(name, SamplingParams(**{"max_tokens": 100, "ignore_eos": True} | params), prompt))

    def finish() -> None:
        while engine.has_work:
            found.update({output.request_id: output for output in engine.step().finished})
            engine.check()

    for crowd in crowds:
        for n in crowd:
            run(str(n), prompts[n], temperature=0.3 * (n % 3 == 2), seed=n)
        finish()
        if crowd == [0]:
            run("again", prompts[0] + found["0"].token_ids[:50], temperature=0.0)
            finish()
    stats = engine.stats()
    engine.close()
    tokens = {name: output.token_ids for name, output in found.items()}
    return Said(tokens, stats.drafted_tokens, stats.accepted_tokens, found["again"].metrics.cached_tokens)


@needs_library
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_wrong_guesses_leave_nothing_behind(
    form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights hardly ever repeat themselves, so nearly every guess is overwritten."""
    monkeypatch.setattr("engine.speculation.LEAST_TRUST_CHEAP", 0.0)
    monkeypatch.setattr("engine.speculation.NGRAM", 1)
    model = str(write_random_model(tmp_path / "model"))
    prompts = [tuple(3 + i % (3 + n) for i in range(9 + n)) for n in range(12)]
    crowds = ([0], [1], [2], range(3, 12))
    plain, guessed = (said(most, crowds, prompts, model=model, cache=tmp_path, **form) for most in (0, 4))
    assert guessed.tokens == plain.tokens
    assert plain.drafted == 0
    assert guessed.drafted - guessed.accepted > 10
    assert guessed.cached > 0


@needs_library
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("form", [*FORMS[1:], {"quantization": "gguf"}], ids=str)
def test_right_guesses_change_no_token(form: dict[str, Any], demo_model: Path) -> None:
    """Greedy and seeded, alone and in a crowd that each worker divides; and what is shared afterwards is right."""
    work = json.loads((ROOT / "bench" / "workloads.json").read_text())["w1"]
    prompts = [tuple(prompt) for prompt in sorted(work, key=len)[:18]]
    crowds = ([0], [1], [2], range(3, 18))
    plain, guessed = (said(most, crowds, prompts, model=str(demo_model), **form) for most in (0, 4))
    assert guessed.tokens == plain.tokens
    assert guessed.accepted > 200
    assert guessed.cached > 0
