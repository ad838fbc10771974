"""A model's structure from the metadata of a GGUF file. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.model.spec import ModelSpec, RopeSpec, layer_count, require


def spec_from_gguf(metadata: Mapping[str, Any], tensor_names: frozenset[str], vocab_rows: int) -> ModelSpec:
    """Read the metadata of a GGUF file; what it doesn't state, the presence of tensors does."""
    architecture = metadata["general.architecture"]
    require(architecture in ("llama", "qwen2", "qwen3"), f"GGUF architecture {architecture!r}")

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{name}", default)

    heads = int(get("attention.head_count"))
    head_size = int(get("attention.key_length") or get("embedding_length") // heads)
    require(int(get("attention.value_length", head_size)) == head_size, "values of another size than keys")
    require(int(get("rope.dimension_count", head_size)) == head_size, "rotary positions on a part of a head")
    require(int(get("expert_count", 0)) == 0, "mixture of experts")
    window, layers = get("attention.sliding_window"), layer_count(get("block_count"))
    return ModelSpec(
        architecture=architecture,
        vocab_rows=vocab_rows,
        hidden_size=int(get("embedding_length")),
        layers=layers,
        heads=heads,
        kv_heads=int(get("attention.head_count_kv", heads)),
        head_size=head_size,
        inner_size=int(get("feed_forward_length")),
        context_len=int(get("context_length")),
        norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope=_gguf_rope(metadata, architecture),
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_up.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        tied_head="output.weight" not in tensor_names,
        local_layers=frozenset(range(layers) if window else ()),
        local_window=int(window) if window else None,
    )


def _gguf_rope(metadata: Mapping[str, Any], architecture: str) -> RopeSpec:
    """Llama 3's scaling isn't here: a GGUF file carries it as the tensor `rope_freqs.weight`."""
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    require(kind in ("none", "linear"), f"rope scaling of type {kind!r}")
    factor = metadata.get(f"{architecture}.rope.scaling.factor", 1.0) if kind == "linear" else 1.0
    return RopeSpec(theta=float(metadata.get(f"{architecture}.rope.freq_base", 10000.0)), linear_factor=float(factor))
