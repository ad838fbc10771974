"""Vectors of texts: every token that counts is in them, once, whatever happens on the way."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, EngineConfig, SamplingParams
from engine.cpu.model import CpuModel
from engine.engine import Engine
from engine.model import load_model
from engine.pooling import Pooling
from engine.request import EngineRequest, FinishReason, RequestRefused
from tests.unit.engine.bench import Bench, make_bench
from tests.unit.engine.model.random_models import save_random_model
from tests.unit.engine.model.test_pooling_files import write_modules
from tests.unit.kernels.isas import needs_library

Kind = Literal["last", "mean", "first"]
KINDS: tuple[Kind, ...] = ("last", "mean", "first")


def embedding_bench(kind: Kind, **config: Any) -> Bench:
    """An engine whose model's vectors are sums of token ids and of positions."""
    bench = make_bench(**config)
    bench.model.info = replace(bench.model.info, pooling=Pooling(kind))
    bench.engine = Engine(bench.model, bench.engine._config)
    return bench


def embed(bench: Bench, id: str, tokens: list[int], **fields: Any) -> None:  # noqa: A002
    bench.engine.add(EngineRequest(id, SamplingParams(max_tokens=0), tuple(tokens), embeds=True, **fields))


def expected(kind: Kind, tokens: list[int]) -> tuple[float, float]:
    match kind:
        case "last":
            return tokens[-1], len(tokens) - 1
        case "first":
            return tokens[0], 0
        case "mean":
            return sum(tokens) / len(tokens), (len(tokens) - 1) / 2


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    budget=st.integers(3, 20),
    pages=st.integers(22, 40),
    priorities=st.lists(st.integers(0, 2), min_size=8, max_size=8),
)
def test_every_token_counts_once(
    kind: Kind, lengths: list[int], budget: int, pages: int, priorities: list[int]
) -> None:
    """In chunks, beside others that generate, preempted by more urgent ones that come later."""
    bench = embedding_bench(kind, pages=pages, max_num_batched_tokens=budget, max_seq_len=60, swap_space_bytes=0)
    texts = {f"e{i}": [97 + (i * 7 + j) % 20 for j in range(n)] for i, n in enumerate(lengths)}
    for i, (name, tokens) in enumerate(texts.items()):
        embed(bench, name, tokens, priority=priorities[i])
        bench.add(f"g{i}", [97 + i] * 9, priority=2 - priorities[i], max_tokens=12)
        bench.step()
    bench.run()
    for name, tokens in texts.items():
        output = bench.outputs[name]
        assert output.finish_reason == FinishReason.LENGTH
        assert output.embedding == pytest.approx(expected(kind, tokens))
        assert (output.token_ids, output.text) == ((), "")
    assert all(bench.outputs[f"g{i}"].embedding is None for i in range(len(lengths)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_text_is_not_summed_twice(kind: Kind) -> None:
    bench = embedding_bench(kind, pages=22, max_num_batched_tokens=8, max_seq_len=80, swap_space_bytes=0)
    tokens = list(range(97, 97 + 20)) * 3
    embed(bench, "text", tokens, priority=2)
    for _ in range(4):
        bench.step()
    bench.add("urgent", [100] * 60, priority=0)
    bench.run()
    output = bench.outputs["text"]
    assert output.metrics.preemptions == 1
    assert output.embedding == pytest.approx(expected(kind, tokens))


def test_only_what_needs_the_last_token_alone_shares_a_prefix() -> None:
    tokens = list(range(97, 97 + 20)) * 2
    cached = {}
    for kind in KINDS:
        bench = embedding_bench(kind, pages=60, max_num_batched_tokens=64, max_seq_len=80)
        for name in ("one", "other"):
            embed(bench, name, tokens)
            bench.run()
            assert bench.outputs[name].embedding == pytest.approx(expected(kind, tokens))
        cached[kind] = bench.outputs["other"].metrics.cached_tokens
    assert cached == {"last": 36, "mean": 0, "first": 0}


def test_an_aborted_text_has_no_vector() -> None:
    bench = embedding_bench("mean", pages=22, max_num_batched_tokens=8, max_seq_len=80)
    embed(bench, "text", [97] * 30)
    bench.step()
    bench.engine.abort("text")
    bench.run()
    assert bench.outputs["text"].finish_reason == FinishReason.ABORT
    assert bench.outputs["text"].embedding is None


class TestRefusals:
    def test_what_an_embedding_has_not(self) -> None:
        bench = embedding_bench("last", pages=22, max_seq_len=80)
        for params in (SamplingParams(), SamplingParams(max_tokens=0, prompt_logprobs=1)):
            with pytest.raises(RequestRefused, match="an embedding has no output"):
                bench.engine.add(EngineRequest("x", params, (97,), embeds=True))

    def test_a_model_that_makes_none(self) -> None:
        bench = make_bench()
        bench.model.info = replace(bench.model.info, pooling=None)
        engine = Engine(bench.model, bench.engine._config)
        with pytest.raises(RequestRefused, match="HEADRACE_MODEL__EMBEDDINGS=true"):
            engine.add(EngineRequest("x", SamplingParams(max_tokens=0), (97,), embeds=True))

    def test_a_model_that_makes_nothing_else(self) -> None:
        bench = make_bench()
        bench.model.info = replace(bench.model.info, generates=False)
        engine = Engine(bench.model, bench.engine._config)
        with pytest.raises(RequestRefused, match="makes embeddings and no text"):
            engine.add(EngineRequest("x", SamplingParams(), (97,)))


def vectors_of_transformers(reference: Any, texts: list[list[int]], kind: Kind, normalised: bool) -> np.ndarray:
    rows = []
    for tokens in texts:
        with torch.inference_mode():
            hidden = reference.model(torch.tensor([tokens])).last_hidden_state[0].double().numpy()
        row = {"last": hidden[-1], "first": hidden[0], "mean": hidden.mean(0)}[kind]
        rows.append(row / np.linalg.norm(row) if normalised else row)
    return np.array(rows)


TEXTS = [[5, 6, 7], [8], [9, 10, 11, 12] * 12, [13] * 5, [5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("family", "config", "pooling", "kind"),
    [
        ("Qwen3", {}, {"pooling_mode_lasttoken": True}, "last"),
        ("Mistral", {"sliding_window": 7}, {"pooling_mode_mean_tokens": True}, "mean"),
        ("Gemma3", {"sliding_window": 7}, {"pooling_mode_cls_token": True}, "first"),
        ("Olmo2", {"pad_token_id": 0}, {"pooling_mode_mean_tokens": True}, "mean"),
    ],
    ids=["qwen3-last", "mistral-mean", "gemma3-first", "foreign-mean"],
)
@pytest.mark.parametrize("normalised", [True, False])
def test_vectors_are_those_of_transformers(
    tmp_path: Path, family: str, config: dict[str, Any], pooling: dict[str, Any], kind: Kind, normalised: bool
) -> None:
    reference, path = save_random_model(tmp_path, family, **config)
    write_modules(path, pooling, ("Transformer", "Pooling", "Normalize")[: 2 + normalised])
    with LLM(
        path, cache=tmp_path, dtype="float32", max_num_batched_tokens=16, kv_cache_bytes=2**25, max_seq_len=64
    ) as llm:
        outputs = llm.embed(TEXTS)
        [again] = llm.embed("<9> <10> <11> <12>")
        [text] = llm.generate([[5, 6]], SamplingParams(max_tokens=4, ignore_eos=True))
    got = np.array([output.embedding for output in outputs])
    np.testing.assert_allclose(got, vectors_of_transformers(reference, TEXTS, kind, normalised), rtol=1e-3, atol=1e-4)
    assert again.prompt_token_ids == (9, 10, 11, 12)
    assert len(text.token_ids) == 4


def test_a_model_without_a_head_is_for_embeddings_alone(tmp_path: Path) -> None:
    """As most of the hub's embedding models are saved: names without a beginning, and no head."""
    reference, path = save_random_model(tmp_path, "Qwen3")
    reference.model.save_pretrained(path)
    assert json.loads((path / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    with LLM(path, cache=tmp_path, dtype="float32", device="cpu", embeddings=True, max_seq_len=64) as llm:
        [output] = llm.embed([TEXTS[2]])
        with pytest.raises(RequestRefused, match="makes embeddings and no text"):
            llm.generate("<5>")
    np.testing.assert_allclose(
        output.embedding, vectors_of_transformers(reference, TEXTS[2:3], "last", False)[0], rtol=1e-3, atol=1e-4
    )


def test_the_tokenizer_ends_a_text_itself(tmp_path: Path) -> None:
    """Models that pool the last token have it put there: a token that ends every text."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    _, path = save_random_model(tmp_path, "Qwen3")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="$A <2>", special_tokens=[("<2>", 2)])
    tokenizer.save(str(path / "tokenizer.json"))
    with LLM(path, cache=tmp_path, dtype="float32", device="cpu", embeddings=True, max_seq_len=64) as llm:
        [output] = llm.embed("<5> <6>")
        [text] = llm.generate("<5> <6>", SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == (5, 6, 2)
    assert text.prompt_token_ids == (5, 6)
    assert output.embedding is not None
    assert not math.isnan(sum(output.embedding))


@needs_library
def test_the_cpu_library_leaves_embeddings_to_torch(tmp_path: Path) -> None:
    _, path = save_random_model(tmp_path, "Qwen3")
    for embeddings in (False, True):
        model = load_model(EngineConfig(str(path), cache=tmp_path, device="cpu", embeddings=embeddings))
        assert isinstance(model, CpuModel) != embeddings
        model.close()
