from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine import LLM, RequestOutput, SamplingParams
from engine.memory.machine import resident_bytes
from tests.unit.kernels.isas import needs_library

pytestmark = [pytest.mark.slow, pytest.mark.model]

PROMPTS = ["The capital of France is", "Once upon a time", "Hello, my"]
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""Of the demo model in float32: layers, keys and values, heads, their size, bytes."""
GREEDY = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(str(demo_model), dtype="float32", max_seq_len=256, kv_cache_bytes=2**26) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[RequestOutput]:
    """What each prompt gives with the engine for itself."""
    return [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]


def test_a_known_continuation(alone: list[RequestOutput]) -> None:
    assert alone[0].text.startswith(" Paris")


def test_a_batch_gives_what_each_prompt_gives_alone(llm: LLM, alone: list[RequestOutput]) -> None:
    """https://github.com/vllm-project/vllm/issues/5952"""
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == [output.token_ids for output in alone]


def test_a_stop_string_cuts_what_the_same_request_gives_without(llm: LLM, alone: list[RequestOutput]) -> None:
    whole = alone[1].text
    stop = whole[5:9]
    [cut] = llm.generate(PROMPTS[1], replace(GREEDY, stop=(stop,)))
    assert (cut.text, cut.stop_reason) == (whole[: whole.index(stop)], stop)


def test_preemption_and_chunks_change_no_token(demo_model: Path, alone: list[RequestOutput]) -> None:
    """https://github.com/vllm-project/vllm/issues/16832"""
    four_pages = {"page_size": 4, "max_seq_len": 16, "kv_cache_bytes": 4 * 4 * KV_BYTES_PER_TOKEN}
    with LLM(str(demo_model), dtype="float32", max_num_batched_tokens=4, **four_pages) as small:
        found = small.generate(PROMPTS, GREEDY)
    assert sum(output.metrics.preemptions for output in found) > 0
    assert [output.token_ids for output in found] == [output.token_ids for output in alone]


def test_sleep_gives_the_memory_back_and_changes_no_token(llm: LLM, alone: list[RequestOutput]) -> None:
    """Weights in float32 take 538 MB; what torch keeps of freed memory is much less."""
    llm.generate(PROMPTS, GREEDY)
    before = resident_bytes()
    llm.sleep()
    assert before - resident_bytes() > 400e6
    with pytest.raises(RuntimeError, match="wake it first"):
        llm.generate(PROMPTS, GREEDY)
    llm.wake()
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == [output.token_ids for output in alone]


def test_a_smaller_kv_memory_is_given_back(llm: LLM, alone: list[RequestOutput]) -> None:
    """A thousand tokens of KV take 46 MB in float32."""
    llm.generate([[number] * 240 for number in range(1, 5)], GREEDY)
    before = resident_bytes()
    llm._engine.set_kv_bytes(12 * 2**20)
    assert before - resident_bytes() > 25e6
    llm._engine.check()
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == [output.token_ids for output in alone]
    llm._engine.set_kv_bytes(2**26)
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == [output.token_ids for output in alone]


@needs_library
@pytest.mark.parametrize("form", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_preemption_and_chunks_change_no_token_on_the_library(demo_model: Path, form: dict[str, str]) -> None:
    """One unit of memory holds less than two of the three requests; every result must be the same bits.

    https://github.com/vllm-project/vllm/issues/16832
    """
    max_seq_len = 80 if "float32" in form.values() else 128
    params = SamplingParams(max_tokens=max_seq_len - 10, temperature=0, ignore_eos=True)
    found = []
    for sizes in ({}, {"kv_cache_bytes": 2**22, "max_num_batched_tokens": 7, "swap_space_bytes": 0}):
        with LLM(str(demo_model), device="cpu", max_seq_len=max_seq_len, **form, **sizes) as llm:
            found.append(llm.generate(PROMPTS, params))
    assert [output.token_ids for output in found[0]] == [output.token_ids for output in found[1]]
    assert sum(output.metrics.preemptions for output in found[1]) > 0
