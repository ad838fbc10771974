"""What bfloat16 and int8 may change of the demo model's output on the CPU, and what they may not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.quality import PIECE_TOKENS, Scores, pieces_of, sample_text, score
from tests.conformance.conftest import generate
from tests.conformance.test_greedy import EOS, SOURCE
from tests.unit.kernels.isas import needs_library

pytestmark = [needs_library, pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]

NEW_TOKENS = 24


def config(demo_model: Path, **form: Any) -> EngineConfig:
    return EngineConfig(str(demo_model), device="cpu", max_seq_len=PIECE_TOKENS, **form)


@pytest.fixture(scope="module")
def half(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model as transformers loads it in bfloat16."""
    from transformers import LlamaForCausalLM

    path = tmp_path_factory.mktemp("half")
    copy.deepcopy(reference).to(torch.bfloat16).save_pretrained(path)
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


@torch.inference_mode()
def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


def test_greedy_tokens_differ_from_float32_only_where_the_top_two_are_within_rounding(
    demo_model: Path, reference: Any, half: Any
) -> None:
    """Rounding is what transformers' own bfloat16 does to these very logits."""
    (tokens,) = pieces_of(config(demo_model), SOURCE)
    prompts = [tuple(tokens[7 * i : 7 * i + 20 + 9 * i]) for i in range(12)]
    with LLM(str(demo_model), dtype="bfloat16", device="cpu", max_seq_len=PIECE_TOKENS) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
    differing = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        got = list(output.token_ids)
        expected = generate(reference, prompt, NEW_TOKENS, EOS)
        place = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
        if place is None:
            assert got == expected
            continue
        differing += 1
        known = [*prompt, *got[:place]]
        exact = logits_of(reference, known)[-1]
        rounding = float((logits_of(half, known)[-1] - exact).abs().max())
        gap = float(exact.max() - exact[got[place]])
        assert gap < 2 * rounding, f"{got[place]} instead of {expected[place]}, {gap} behind; rounding is {rounding}"
    assert differing < len(prompts) // 2


def texts() -> list[str]:
    """The fixed text, begun at three of its paragraphs: near ties fall either way, and a third of the tokens alone
    would leave half a point to chance."""
    paragraphs = sample_text().split("\n\n")
    return ["\n\n".join(paragraphs[start:] + paragraphs[:start]) for start in (0, 9, 20)]


def scored(demo_model: Path, **form: Any) -> list[Scores]:
    return [score(config(demo_model, **form), text) for text in texts()]


def agreement(likeliest: list[int], exact: list[Scores]) -> float:
    expected = [token for scores in exact for token in scores.likeliest]
    return sum(a == b for a, b in zip(likeliest, expected, strict=True)) / len(expected)


@pytest.fixture(scope="module")
def exact(demo_model: Path) -> list[Scores]:
    return scored(demo_model, dtype="float32")


@pytest.fixture(scope="module")
def theirs(demo_model: Path, half: Any, exact: list[Scores]) -> float:
    """Greedy agreement of transformers' bfloat16 with float32."""
    pieces = [piece for text in texts() for piece in pieces_of(config(demo_model), text)]
    return agreement([token for piece in pieces for token in logits_of(half, piece)[:-1].argmax(-1).tolist()], exact)


def test_float32_scores_are_those_of_transformers(demo_model: Path, reference: Any, exact: list[Scores]) -> None:
    told = iter(zip(exact[0].logprobs, exact[0].likeliest, strict=True))
    for piece in pieces_of(config(demo_model), sample_text()):
        expected = logits_of(reference, piece)[:-1].log_softmax(-1)
        for row, token in zip(expected, piece[1:], strict=True):
            logprob, likeliest = next(told)
            assert logprob == pytest.approx(float(row[token]), abs=1e-3)
            assert float(row.max() - row[likeliest]) < 1e-3
    assert next(told, None) is None


@pytest.mark.parametrize(
    ("form", "least"),
    [({}, 0.0), ({"quantization": "int8"}, -0.02), ({"quantization": "gguf"}, -0.02)],
    ids=["bfloat16", "int8", "gguf"],
)
def test_greedy_agreement_beside_that_of_transformers_in_bfloat16(
    demo_model: Path, exact: list[Scores], theirs: float, form: dict[str, Any], least: float
) -> None:
    ours = scored(demo_model, dtype="bfloat16", **form)
    assert agreement([token for scores in ours for token in scores.likeliest], exact) >= theirs + least
    assert ours[0].perplexity == pytest.approx(exact[0].perplexity, rel=0.01)
