"""Pages that no token will see any more are given back, and nobody misses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.engine import Engine
from engine.fake import FakeModel
from engine.sequence import GONE
from tests.unit.engine.bench import Bench, expected, make_bench
from tests.unit.engine.model.random_models import save_random_model

REACH = 10
MOST_HELD = 3
"""Pages of 4 tokens after a step: the 9 before the next one may touch so many."""


def reach_bench(pages: int, **config: Any) -> Bench:
    return make_bench(FakeModel(reach_tokens=REACH), pages, max_seq_len=80, **config)


def held(bench: Bench) -> list[int]:
    return [len(sequence.held_pages) for sequence in bench.engine._scheduler.running]


def test_a_request_holds_no_more_than_its_window(overlap: bool) -> None:
    bench = reach_bench(40)
    bench.add("one", "x" * 20, max_tokens=50)
    most = 0
    while bench.engine.has_work:
        bench.step()
        if bench.tokens:
            most = max([most, *held(bench)])
    assert most == MOST_HELD + overlap, "the step under way has its page, too"
    assert bench.tokens["one"] == expected("x" * 20, 50)


@pytest.mark.in_turn
def test_a_long_prompt_gives_back_as_it_is_computed() -> None:
    bench = reach_bench(40, max_num_batched_tokens=8)
    bench.add("one", "x" * 64, max_tokens=4)
    counts = []
    while bench.engine.has_work:
        bench.step()
        counts += held(bench)
    assert counts[:3] == [16, 15, 13], "8 tokens of 64 are computed by each step; the next one sees 9 before it"
    assert counts[-1] <= MOST_HELD


def test_more_requests_fit_into_the_same_memory() -> None:
    def preemptions(reach_tokens: int | None) -> int:
        bench = make_bench(FakeModel(reach_tokens=reach_tokens), 24, max_seq_len=80)
        for number in range(4):
            bench.add(str(number), "abcdefgh"[number:] * 2, max_tokens=60)
        bench.run()
        assert all(len(bench.tokens[str(number)]) == 60 for number in range(4))
        return sum(output.metrics.preemptions for output in bench.outputs.values())

    assert preemptions(REACH) == 0
    assert preemptions(None) > 0


def test_pages_that_were_given_back_are_still_found() -> None:
    bench = reach_bench(60)
    prompt = "a prompt that two requests have in common"
    bench.add("first", prompt, max_tokens=30)
    for _ in range(20):
        bench.step()
    assert held(bench) == [MOST_HELD]
    bench.add("second", prompt, max_tokens=30)
    bench.run()
    assert bench.tokens["first"] == bench.tokens["second"] == expected(prompt, 30)
    assert bench.outputs["second"].metrics.cached_tokens == 40


def test_others_keep_what_one_gives_back() -> None:
    """Completions of one prompt share its pages, and get to their ends at different moments."""
    bench = reach_bench(60, max_num_batched_tokens=16, enable_prefix_caching=False)
    bench.add("one", "x" * 33, n=3, max_tokens=30)
    bench.run()
    assert bench.tokens["one"] == expected("x" * 33, 30)
    assert {tokens for _, tokens in bench.others.values()} == {expected("x" * 33, 30)}


def test_one_that_made_way_is_computed_again() -> None:
    bench = reach_bench(21, swap_space_bytes=2**20)
    bench.add("low", "x" * 30, priority=2, max_tokens=40)
    for _ in range(10):
        bench.step()
    assert bench.engine._scheduler.running[0].pages[0] is GONE
    bench.add("high", "y" * 70, priority=0, max_tokens=8)
    bench.run()
    assert bench.outputs["low"].metrics.preemptions == 1
    assert bench.engine.stats().swaps == 0
    assert bench.tokens["low"] == expected("x" * 30, 40)


def test_giving_back_too_early_would_be_noticed() -> None:
    """The fake model reads what its own window tells it to, whatever the engine believes."""
    bench = reach_bench(24)
    bench.engine = Engine(bench.model, bench.engine._config)
    object.__setattr__(bench.model.info, "reach_tokens", REACH + 8)
    bench.add("one", "x" * 40, max_tokens=40)
    bench.add("two", "y" * 40, max_tokens=40)
    with pytest.raises(AssertionError, match=r"other slots|not its own"):
        bench.run()


@pytest.mark.parametrize("page_size", [16, 8], ids=["library", "torch"])
def test_a_model_with_a_window_makes_the_tokens_of_transformers(tmp_path: Path, page_size: int) -> None:
    """More requests than the pool holds whole: pages that were given back are soon others'."""
    reference, path = save_random_model(tmp_path, "Mistral", sliding_window=20)
    prompts = [[3 + (7 * i + j) % 90 for j in range(20 + 9 * i)] for i in range(6)]
    wanted = []
    for prompt in prompts:
        with torch.inference_mode():
            whole = reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=60, min_new_tokens=60,
                do_sample=False, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        wanted.append(tuple(whole[0, len(prompt) :].tolist()))
    config: dict[str, Any] = {"dtype": "float32", "device": "cpu", "page_size": page_size, "max_seq_len": 160}
    with LLM(path, cache=tmp_path, max_num_batched_tokens=32, warm_up=False, **config) as llm:
        pool = llm._engine._scheduler.pool
        pool.resize(10 * 16 // page_size + 4)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    assert [output.token_ids for output in outputs] == wanted
