"""The CPU library against `transformers` on small random models of each family, in float32, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.cpu.model import CpuModel
from engine.model import load_model
from tests.unit.engine.model.random_models import LLAMA3, LONGROPE, PHI3, VARIANTS, VOCAB, YARN, save_random_model
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
    pytest.param("Mistral", {"sliding_window": 21, "num_key_value_heads": 1, "head_dim": 96}, id="mistral-96-window"),
    pytest.param("Qwen2", {"tie_word_embeddings": True, "head_dim": 8}, id="qwen2"),
    pytest.param("Qwen2", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}, id="qwen2-ungrouped"),
    pytest.param("Qwen3", {"head_dim": 32}, id="qwen3"),
    pytest.param("Qwen3", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 80}, id="qwen3-biases-80"),
    pytest.param("Qwen3", {"rope_parameters": YARN}, id="qwen3-yarn"),
    pytest.param("Phi3", {**PHI3, "sliding_window": 30}, id="phi3-window"),
    pytest.param("Phi3", {**PHI3, "rope_parameters": LONGROPE}, id="phi3-longrope"),
]


@pytest.mark.parametrize(
    ("variant", "lacking"),
    [
        ("qwen2-window", "layers with different windows"),
        ("gemma", "other norms"),
        ("gemma2", "layers with different windows"),
        ("gemma2-tight-caps", "layers with different windows"),
        ("gemma3", "layers with different windows"),
        ("phi3-partial", "a part of a head"),
        ("gpt2", "learned positions"),
        ("mixtral", "a mixture of experts"),
    ],
)
def test_what_the_library_lacks_torch_serves(
    tmp_path: Path, variant: str, lacking: str, caplog: pytest.LogCaptureFixture
) -> None:
    family, config = VARIANTS[variant]
    _, path = save_random_model(tmp_path, family, **config)
    model = load_model(EngineConfig(str(path), cache=tmp_path, device="cpu"))
    assert type(model).__name__ == "TorchModel"
    assert lacking in caplog.text
    model.close()


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
