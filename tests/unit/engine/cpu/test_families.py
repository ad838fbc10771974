"""The CPU library against `transformers` on small random models of each family, in float32, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.cpu.model import CpuModel
from tests.unit.engine.model.random_models import LLAMA3, VOCAB, save_random_model
from tests.unit.engine.stepping import allocate, score
from tests.unit.kernels.isas import every_isa

FAMILIES = [
    pytest.param("Llama", {}, id="llama"),
    pytest.param("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, id="llama-biases"),
    pytest.param("Llama", {"rope_parameters": LLAMA3}, id="llama3-rope"),
    pytest.param("Llama", {"num_key_value_heads": 6, "head_dim": 8}, id="llama-narrow-heads"),
    pytest.param(
        "Llama",
        {"hidden_size": 51, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 75},
        id="llama-odd-sizes",
    ),
    pytest.param("Llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}, id="llama-64"),
    pytest.param("Llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}, id="llama-256"),
    pytest.param("Mistral", {"sliding_window": None, "head_dim": 20}, id="mistral-20"),
    pytest.param("Mistral", {"sliding_window": 200, "num_key_value_heads": 1, "head_dim": 96}, id="mistral-96"),
    pytest.param("Qwen2", {"tie_word_embeddings": True, "head_dim": 8}, id="qwen2"),
    pytest.param("Qwen2", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}, id="qwen2-ungrouped"),
    pytest.param("Qwen3", {"head_dim": 32}, id="qwen3"),
    pytest.param("Qwen3", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 80}, id="qwen3-biases-80"),
]


@every_isa()
@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_logprobs_are_those_of_transformers(
    tmp_path: Path, family: str, config: dict[str, Any], isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CPU_ISA", isa)
    reference, path = save_random_model(tmp_path, family, **config)
    tokens = torch.randint(3, VOCAB, (90,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    model = CpuModel.load(EngineConfig(str(path), cache=tmp_path, dtype="float32", threads=2))
    allocate(model)
    reports = score(model, tokens, chunk=37)
    model.close()
    assert expected.std() > 0.3, "weights too small to tell a right model from a wrong one"
    for row, token, report in zip(expected, tokens[1:], reports, strict=True):
        top = row.topk(5)
        assert report.logprob == pytest.approx(float(row[token]), abs=2e-4, rel=1e-5)
        assert report.rank == int((row > row[token]).sum()) + 1
        assert [token_id for token_id, _ in report.top] == top.indices.tolist()
        assert [logprob for _, logprob in report.top] == pytest.approx(top.values.tolist(), abs=2e-4)
