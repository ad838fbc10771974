"""Architectures that aren't ours, by transformers' code with our attention: tokens are those of transformers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.model import load_model
from engine.model.foreign import ForeignDecoder
from engine.model.spec import UnsupportedModel
from engine.runner import TorchModel
from tests.unit.engine.model.random_models import GPT2, greedy_tokens, save_random_model
from tests.unit.engine.stepping import Run, allocate, finish, prompts

GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
LATENT = {
    "head_dim": 8, "num_key_value_heads": 6, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "moe_intermediate_size": 16, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS = [
    pytest.param("Olmo2", {"pad_token_id": 0}, id="olmo2-post-norms"),
    pytest.param("Granite", {"logits_scaling": 4.0, "residual_multiplier": 0.5}, id="granite-scales"),
    pytest.param("SmolLM3", {"pad_token_id": 0, "no_rope_layer_interval": 2}, id="smollm3-no-rope"),
    pytest.param("GPTNeoX", {"rotary_pct": 0.25, "pad_token_id": 0}, id="neox-partial-rotary"),
    pytest.param("Starcoder2", {"sliding_window": 9}, id="starcoder2-window"),
    pytest.param("GptOss", GPT_OSS, id="gpt-oss-sinks"),
    pytest.param("DeepseekV3", LATENT, id="deepseek-narrow-values"),
    pytest.param("GPT2", {**GPT2, "activation_function": "relu"}, id="gpt2-activation"),
    pytest.param("GPT2", {**GPT2, "scale_attn_weights": False}, id="gpt2-unscaled"),
    pytest.param("GPT2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}, id="gpt2-scaled-by-layer"),
    pytest.param("Cohere", {"pad_token_id": 0, "logit_scale": 0.5}, id="cohere-logit-scale"),
]


@pytest.mark.parametrize(("family", "config"), MODELS)
def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    reference, path = save_random_model(tmp_path, family, **config)
    expected = greedy_tokens(reference, prompts(), 12)
    model = load_model(EngineConfig(str(path), cache=tmp_path, dtype="float32", device="cpu"))
    assert isinstance(model, TorchModel)
    assert isinstance(model._decoder, ForeignDecoder)
    allocate(model)
    assert finish(model, [Run(prompt) for prompt in prompts()], 12, chunk=7) == expected
    model.close()


def test_what_a_family_of_ours_lacks_is_foreign_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, path = save_random_model(tmp_path, "Llama", hidden_act="relu")
    model = load_model(EngineConfig(str(path), cache=tmp_path, device="cpu"))
    assert "activation 'relu'" in caplog.text
    assert (model.info.context_len, model.info.vocab_size) == (512, 96)
    model.close()


def test_a_window_that_is_asked_for_narrows_a_foreign_model(tmp_path: Path) -> None:
    _, path = save_random_model(tmp_path, "Olmo2", pad_token_id=0)
    outputs = []
    for window in (None, 5, 600):
        model = load_model(
            EngineConfig(str(path), cache=tmp_path, device="cpu", dtype="float32", sliding_window=window)
        )
        allocate(model)
        outputs.append(finish(model, [Run(prompt) for prompt in prompts()], 12, 7))
        model.close()
    assert outputs[0] == outputs[2] != outputs[1]


@pytest.mark.parametrize(
    ("family", "config", "said"),
    [
        ("Mamba", {"state_size": 4}, "MambaForCausalLM is not supported.*nor does transformers' code"),
        ("Bloom", {"n_layer": 2, "n_head": 6}, "BloomForCausalLM is not supported.*nor does transformers' code"),
        ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "Lfm2.*nor can transformers' code serve it"),
    ],
)
def test_what_keeps_more_than_keys_and_values_is_refused(
    tmp_path: Path, family: str, config: dict[str, Any], said: str
) -> None:
    _, path = save_random_model(tmp_path, family, **config)
    with pytest.raises(UnsupportedModel, match=said):
        load_model(EngineConfig(str(path), cache=tmp_path, device="cpu", dtype="float32"))


@pytest.mark.parametrize(
    ("family", "config", "said"),
    [
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary positions"),
        (
            "Llama4",
            {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "pad_token_id": 0},
            "chunk",
        ),
    ],
)
def test_what_a_trial_is_too_short_to_show_is_refused(
    tmp_path: Path, family: str, config: dict[str, Any], said: str
) -> None:
    _, path = save_random_model(tmp_path, family, **config)
    with pytest.raises(UnsupportedModel, match=f"nor can transformers' code serve it here: it.*{said}"):
        load_model(EngineConfig(str(path), cache=tmp_path, device="cpu", dtype="float32"))


def test_a_model_with_another_head_is_refused(tmp_path: Path) -> None:
    """transformers would give it a new head of random numbers."""
    _, path = save_random_model(tmp_path, "Llama")
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace("LlamaForCausalLM", "LlamaForSequenceClassification"))
    with pytest.raises(UnsupportedModel, match="nor does transformers know it as a model that generates text"):
        load_model(EngineConfig(str(path), cache=tmp_path, device="cpu"))


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    """transformers would fill it with random numbers and warn."""
    from safetensors.torch import load_file, save_file

    _, path = save_random_model(tmp_path, "Olmo2", pad_token_id=0)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"no tensors model\.layers\.1\.mlp\.down_proj\.weight"):
        load_model(EngineConfig(str(path), cache=tmp_path, device="cpu"))


def test_an_unknown_architecture_with_code_of_its_own_is_refused_unread(tmp_path: Path) -> None:
    _, path = save_random_model(tmp_path, "Llama")
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UnsupportedModel, match=r"OwnForCausalLM is not supported.*nor has transformers code for it"):
        load_model(EngineConfig(str(path), cache=tmp_path, device="cpu"))
