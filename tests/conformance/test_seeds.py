"""Sampled output of the whole engine depends on a request's own seed and parameters, in float32.

https://github.com/vllm-project/vllm/issues/51226, https://github.com/vllm-project/vllm/issues/17524
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from kernels.sampling import choice_seed

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]

PROMPT = "The mill stood by the river, and every morning"
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 1.5, "top_k": 20, "seed": 2, "presence_penalty": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 1.0, "min_p": 0.05, "seed": 3, "logprobs": 3},
    {"temperature": 1.0, "seed": 4, "n": 2},
    {"temperature": 0.7, "seed": 5, "guided_regex": "[a-z ,]{10,60}"},
]


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(str(demo_model), dtype="float32", max_seq_len=256, kv_cache_bytes=2**27) as llm:
        yield llm


def tokens(llm: LLM, asked: list[dict[str, Any]]) -> list[list[tuple[int, ...]]]:
    params = [SamplingParams(max_tokens=12, **one) for one in asked]
    return [[choice.token_ids for choice in output.choices] for output in llm.generate([PROMPT] * len(asked), params)]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[tuple[int, ...]]]:
    return [tokens(llm, [one])[0] for one in REQUESTS]


def test_neighbours_and_their_order_change_nothing(llm: LLM, alone: list[list[tuple[int, ...]]]) -> None:
    unseeded: list[dict[str, Any]] = [{"temperature": 2.0}, {"temperature": 0.9, "top_k": 3}]
    assert tokens(llm, REQUESTS + unseeded)[: len(REQUESTS)] == alone
    assert tokens(llm, (unseeded + REQUESTS)[::-1])[: len(REQUESTS)][::-1] == alone


def test_seeds_and_parameters_make_the_difference(alone: list[list[tuple[int, ...]]]) -> None:
    assert len({one[0] for one in alone}) == len(REQUESTS)


def test_a_completion_is_what_its_seed_gives_alone(llm: LLM, alone: list[list[tuple[int, ...]]]) -> None:
    second = tokens(llm, [{"temperature": 1.0, "seed": choice_seed(4, 1)}])[0]
    assert alone[6] == [tokens(llm, [{"temperature": 1.0, "seed": 4}])[0][0], second[0]]
