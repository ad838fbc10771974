"""Writes small GGUF files, as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor

from engine.model.gguf_weights import file_name

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "Ġ", "1", "2", "ab", "Ġa", "abc"]
CONTROL = 3
MERGES = ["a b", "Ġ a", "ab c"]
HF_PARTS = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "q.bias": "self_attn.q_proj.bias",
    "k.bias": "self_attn.k_proj.bias",
    "v.bias": "self_attn.v_proj.bias",
}


def write_gguf(path: Path, tensors: Mapping[str, Any], architecture: str = "llama", **metadata: Any) -> Path:
    """`tensors`: name -> float32 array, or (raw bytes array, type). `metadata`: with `__` for the dots."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        name = key.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, value in tensors.items():
        array, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_metadata(tokens: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level BPE; three control tokens, of which the third ends a text."""
    tokens = TOKENS if tokens is None else tokens
    return {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": "gpt-2",
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__token_type": [CONTROL] * 3 + [1] * (len(tokens) - 3),
        "tokenizer__ggml__merges": MERGES,
        "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 2,
    } | changes


def model_metadata(config: Any, architecture: str) -> dict[str, Any]:
    """Metadata of a transformers configuration."""
    names = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention__head_count": config.num_attention_heads,
        "attention__head_count_kv": config.num_key_value_heads,
        "attention__key_length": config.head_dim,
        "attention__value_length": config.head_dim,
        "attention__layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope__freq_base": float(config.rope_parameters["rope_theta"]),
        "rope__dimension_count": config.head_dim,
    }
    return {f"{architecture}__{name}": value for name, value in names.items()}


def model_tensors(state: Mapping[str, Tensor], config: Any, architecture: str) -> dict[str, np.ndarray[Any, Any]]:
    """A transformers model's tensors under their GGUF names; q and k of a Llama with their pairs side by side."""
    out = {file_name("embedding"): state["model.embed_tokens.weight"], file_name("norm"): state["model.norm.weight"]}
    if not config.tie_word_embeddings:
        out[file_name("head")] = state["lm_head.weight"]
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for part, name in HF_PARTS.items():
            tensor = state.get(f"model.layers.{layer}.{name}")
            if tensor is None:
                continue
            if architecture == "llama" and part in heads:
                halves = tensor.reshape(heads[part], 2, config.head_dim // 2, -1)
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
            out[file_name(f"{layer}.{part}")] = tensor
    return {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in out.items()}
