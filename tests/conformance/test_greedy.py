"""Greedy output of the whole engine equals transformers' on the same weights, in float32.

Where an output differs from `generate`'s, each of its tokens must still be the likeliest after those
before it, or so close that the order of additions decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.cpu.model import obstacle
from engine.model import open_files
from tests.conformance.conftest import generate
from tests.unit.kernels.isas import needs_library

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]

NEW_TOKENS = 16
EOS = (0, 2)
TIE = 1e-3

SOURCE = """A mill race, or headrace, is the channel that carries water to a mill wheel; what leaves the wheel is the
tailrace. The rate at which a mill can grind depends on the head, the height that the water falls, and on the flow, the
volume that passes in a second. In 1779 a mill at Cromford used 5 wheels, the largest 6.1 metres across, and about
270 people worked there in 2 shifts of 12 hours. def grind(grain, stones=2): return [flour(g) for g in grain if g.dry]
The miller kept a sluice gate, opened it by hand before dawn, and listened: too much water and the stones ran hot, too
little and the flour came coarse. "You hear it," he said, "long before you see it." Naïve visitors thought the wheel
did the work; the water did. Later engineers measured what he heard: 1 horsepower for each 11 cubic feet a second and
foot of fall, less friction. Überlauf, Wehr, Mühlgraben: every language of the valley had its own words for the parts.
"""


SIZES = {"max_seq_len": 1024, "kv_cache_bytes": 2**29, "max_num_batched_tokens": 256}
TORCH = {"page_size": 8}
"""The CPU library has no such pages, so torch serves."""


@pytest.fixture(scope="module", params=[pytest.param({}, marks=needs_library), TORCH], ids=["library", "torch"])
def llm(demo_model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    config = EngineConfig(str(demo_model), dtype="float32", device="cpu", **SIZES | request.param)
    assert (obstacle(config, open_files(config).spec) is None) == (request.param is not TORCH)
    with LLM(str(demo_model), dtype="float32", device="cpu", **SIZES | request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[tuple[int, ...]]:
    """20 prompts of 5 to 400 tokens, each from another place of the text."""
    from tokenizers import Tokenizer

    from engine.model.gguf_file import GGUFFile

    tokenizer = Tokenizer.from_str(GGUFFile(demo_model).text.tokenizer_json)
    ids = tokenizer.encode(SOURCE * 3).ids
    lengths = [5, 6, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 90, 127, 128, 150, 200, 300, 400]
    return [tuple(ids[7 * i : 7 * i + length]) for i, length in enumerate(lengths)]


def outputs(llm: LLM, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    done = llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
    return [list(output.token_ids) for output in done]


@torch.inference_mode()
def assert_greedy(reference: Any, prompt: tuple[int, ...], got: list[int]) -> None:
    """Each token is the reference's likeliest after those before it, and the output ends where it should."""
    logits = reference(torch.tensor([[*prompt, *got[:-1]]])).logits[0, len(prompt) - 1 :]
    behind = logits.amax(-1) - logits.gather(1, torch.tensor(got)[:, None])[:, 0]
    worst = int(behind.argmax())
    assert behind[worst] < TIE, f"token {worst}: {got[worst]} instead of {int(logits[worst].argmax())}"
    assert len(got) == NEW_TOKENS or got[-1] in EOS
    assert not set(got[:-1]) & set(EOS)


@pytest.fixture(scope="module")
def expected(reference: Any, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """What `generate` gives for each prompt, alone."""
    return [generate(reference, prompt, NEW_TOKENS, EOS) for prompt in prompts]


def assert_equal(
    reference: Any, prompts: list[tuple[int, ...]], got: list[list[int]], expected: list[list[int]]
) -> None:
    for prompt, tokens, wanted in zip(prompts, got, expected, strict=True):
        if tokens != wanted:
            assert_greedy(reference, prompt, tokens)


def test_the_prompts_are_20_of_5_to_400_tokens(prompts: list[tuple[int, ...]], expected: list[list[int]]) -> None:
    assert (len(prompts), min(map(len, prompts)), max(map(len, prompts))) == (20, 5, 400)
    assert len({tuple(tokens) for tokens in expected}) > 15, "hardly any two differ: they would prove little"


def test_one_at_a_time(llm: LLM, reference: Any, prompts: list[tuple[int, ...]], expected: list[list[int]]) -> None:
    every = 1 if llm.config.page_size != TORCH["page_size"] else 3  # torch is slow with one row
    got = [outputs(llm, [prompt])[0] for prompt in prompts[::every]]
    assert_equal(reference, prompts[::every], got, expected[::every])


def test_all_in_one_batch(llm: LLM, reference: Any, prompts: list[tuple[int, ...]], expected: list[list[int]]) -> None:
    assert_equal(reference, prompts, outputs(llm, prompts), expected)
