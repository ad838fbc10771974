"""Logprobs of the whole engine equal transformers' on the same weights, in float32, to 1e-4.

https://github.com/vllm-project/vllm/issues/9453
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from tests.conformance.test_greedy import SOURCE

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    sizes = {"max_seq_len": 1024, "kv_cache_bytes": 2**27, "max_num_batched_tokens": 48, "max_num_seqs": 4}
    with LLM(str(demo_model), dtype="float32", **sizes) as llm:
        yield llm


@torch.inference_mode()
def exact(reference: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """[T - 1, V] log-softmax of what follows each token but the last."""
    logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0, :-1]
    return logits.double().log_softmax(-1)


def assert_told(told: Any, row: torch.Tensor) -> None:
    assert told.logprob == pytest.approx(float(row[told.token_id]), abs=1e-4)
    likelier = int((row > row[told.token_id] + 1e-4).sum())
    assert likelier < told.rank <= int((row > row[told.token_id] - 1e-4).sum()) + 1
    for one in told.top:
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
    best = row.topk(len(told.top)).values.tolist()
    assert [one.logprob for one in told.top] == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_p": 0.8, "top_k": 40, "min_p": 0.02},
        {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 1.0, "logit_bias": {100: 5.0}},
        {"temperature": 1.0, "guided_regex": "[a-z ]{5,40}"},
    ],
    ids=["greedy", "cut", "penalised", "constrained"],
)
def test_of_prompts_and_outputs(llm: LLM, reference: Any, params: dict[str, Any]) -> None:
    """Chunks of 48 tokens, requests beside one another; the raw log-softmax, whatever was sampled."""
    prompts = [SOURCE[:length] for length in (30, 200, 700)]
    asked = SamplingParams(max_tokens=10, seed=3, logprobs=5, prompt_logprobs=3, **params)
    for output in llm.generate(prompts, asked):
        tokens = output.prompt_token_ids + output.token_ids
        rows = exact(reference, tokens)
        told = [*(output.prompt_logprobs or ())[1:], *(output.logprobs or ())]
        assert [one.token_id for one in told if one] == list(tokens[1:])
        for one, row in zip(told, rows, strict=True):
            assert_told(one, row)


def test_of_a_prompt_that_is_only_scored(llm: LLM, reference: Any) -> None:
    [output] = llm.generate(SOURCE[:400], SamplingParams(max_tokens=0, prompt_logprobs=0))
    rows = exact(reference, output.prompt_token_ids)
    found = [one.logprob for one in (output.prompt_logprobs or ())[1:] if one]
    wanted = rows.gather(1, torch.tensor(output.prompt_token_ids[1:])[:, None])[:, 0].tolist()
    assert found == pytest.approx(wanted, abs=1e-4)
