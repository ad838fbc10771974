"""The demo model as transformers runs it, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.gguf_file import GGUFFile
from engine.model.gguf_weights import GGUFWeights
from engine.model.tensors import to_torch

PARTS = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@pytest.fixture(scope="session")
def reference(demo_model: Path) -> Any:
    """transformers' Llama with the weights that our own reader gives.

    That these are the weights that transformers reads is a test of its own (`test_gguf_weights`).
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    file = GGUFFile(demo_model)
    spec, weights = file.spec, GGUFWeights(file.header, file.spec)
    config = LlamaConfig(
        vocab_size=spec.vocab_rows,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.inner_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=spec.context_len,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).float().eval()
    state = {
        "model.embed_tokens.weight": to_torch(weights["embedding"]),
        "model.norm.weight": to_torch(weights["norm"]),
    }
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for layer in range(spec.layers):
        for part, name in PARTS.items():
            state[f"model.layers.{layer}.{name}.weight"] = to_torch(weights[f"{layer}.{part}"])
    model.load_state_dict(state)
    model.tie_weights()
    return model


@torch.inference_mode()
def generate(model: Any, prompt: tuple[int, ...], max_new_tokens: int, eos_token_ids: tuple[int, ...]) -> list[int]:
    """transformers' greedy continuation, up to and with the token that ends it."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(eos_token_ids),
        pad_token_id=eos_token_ids[0],
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
