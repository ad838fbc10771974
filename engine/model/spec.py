"""What a decoder is made of, read from a model's configuration. No torch here.

One family: pre-norm decoders with RMSNorm, rotary positions, grouped attention and a gated SiLU
MLP. Whatever would change the result and isn't here is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class UnsupportedModel(ValueError):
    """The model needs something that this engine doesn't have; the message says what."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's stretch of the low frequencies: `rope_scaling` of type `llama3`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding."""

    theta: float
    linear_factor: float = 1.0
    """Positions are divided by it."""
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The structure of one model of the Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3."""

    architecture: str
    """`llama`, `mistral`, `qwen2` or `qwen3`."""
    vocab_rows: int
    """Rows of the embedding; the tokenizer may have fewer ids."""
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner_size: int
    """Width of the MLP."""
    context_len: int
    norm_eps: float
    rope: RopeSpec
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    window_tokens: int | None = None
    """Attention reaches back this far; None is the whole context."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_rows",
            "hidden_size",
            "layers",
            "heads",
            "kv_heads",
            "head_size",
            "inner_size",
            "context_len",
        ):
            if getattr(self, name) < 1:
                raise UnsupportedModel(f"the model's {name} is {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"{self.heads} attention heads can't share {self.kv_heads} key/value heads evenly")
        if self.head_size % 2:
            raise UnsupportedModel(f"rotary positions need an even head size, this model's is {self.head_size}")

    @property
    def usable_context_len(self) -> int:
        """Tokens up to which full attention gives the model's own result: its context, or its window if shorter."""
        return self.context_len if self.window_tokens is None else min(self.context_len, self.window_tokens)

    def activation_bytes(self, tokens: int, rows: int, element_bytes: int) -> int:
        """The most that a step of so many tokens, of which so many rows are sampled, holds at once beside the KV.

        Per token: the residual in float32, and of the layer's attention or its MLP, whichever is wider, what goes
        in and what comes out. Per sampled row: its logits in float32, twice, for whoever changes them.
        """
        residual = 4 * self.hidden_size
        heads = (self.heads + 2 * self.kv_heads) * self.head_size
        attention = heads * element_bytes + 2 * heads * 4 + self.heads * self.head_size * element_bytes
        mlp = 3 * self.inner_size * element_bytes
        layer = 2 * self.hidden_size * element_bytes + max(attention, mlp)
        return tokens * (residual + layer) + rows * 2 * 4 * self.vocab_rows

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * element_bytes


_HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Read a Hugging Face `config.json`."""
    architecture = _hf_architecture(config)
    _require(config.get("hidden_act", "silu") == "silu", f"activation {config.get('hidden_act')!r}")
    _require(config.get("quantization_config") is None, "weights quantised by another library (quantization_config)")
    heads = int(config["num_attention_heads"])
    bias = architecture in ("llama", "qwen3") and bool(config.get("attention_bias", False))
    return ModelSpec(
        architecture=architecture,
        vocab_rows=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or config["hidden_size"] // heads),
        inner_size=int(config["intermediate_size"]),
        context_len=int(config["max_position_embeddings"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_hf_rope(config),
        qkv_bias=architecture == "qwen2" or bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        tied_head=bool(config.get("tie_word_embeddings", False)),
        window_tokens=_hf_window(config, architecture),
    )


def _hf_architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in _HF_ARCHITECTURES:
            return _HF_ARCHITECTURES[name]
    known = ", ".join(_HF_ARCHITECTURES)
    raise UnsupportedModel(f"architecture {', '.join(names) or 'unnamed'} is not supported; supported are {known}")


def _hf_rope(config: Mapping[str, Any]) -> RopeSpec:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before it)."""
    rope = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    rope |= config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(rope.get("rope_theta") or 10000.0)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    _require(partial == 1.0, f"partial_rotary_factor {partial}")
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, linear_factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeSpec(
            theta,
            llama3=Llama3Scaling(
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_context_len=int(rope["original_max_position_embeddings"]),
            ),
        )
    raise UnsupportedModel(f"rope scaling of type {kind!r} is not supported; supported are linear and llama3")


def _hf_window(config: Mapping[str, Any], architecture: str) -> int | None:
    window = config.get("sliding_window", 4096 if architecture == "mistral" else None)
    if window is None or (architecture != "mistral" and not config.get("use_sliding_window", False)):
        return None
    if config.get("layer_types") and "sliding_attention" not in config["layer_types"]:
        return None
    return int(window)


def spec_from_gguf(metadata: Mapping[str, Any], tensor_names: frozenset[str], vocab_rows: int) -> ModelSpec:
    """Read the metadata of a GGUF file; what it doesn't state, the presence of tensors does."""
    architecture = metadata["general.architecture"]
    _require(architecture in ("llama", "qwen2", "qwen3"), f"GGUF architecture {architecture!r}")

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{name}", default)

    heads = int(get("attention.head_count"))
    head_size = int(get("attention.key_length") or get("embedding_length") // heads)
    _require(int(get("attention.value_length", head_size)) == head_size, "values of another size than keys")
    _require(int(get("rope.dimension_count", head_size)) == head_size, "rotary positions on a part of a head")
    _require(int(get("expert_count", 0)) == 0, "mixture of experts")
    window = get("attention.sliding_window")
    return ModelSpec(
        architecture=architecture,
        vocab_rows=vocab_rows,
        hidden_size=int(get("embedding_length")),
        layers=int(get("block_count")),
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
        window_tokens=int(window) if window else None,
    )


def _gguf_rope(metadata: Mapping[str, Any], architecture: str) -> RopeSpec:
    """Llama 3's scaling isn't here: a GGUF file carries it as the tensor `rope_freqs.weight`."""
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    _require(kind in ("none", "linear"), f"rope scaling of type {kind!r}")
    factor = metadata.get(f"{architecture}.rope.scaling.factor", 1.0) if kind == "linear" else 1.0
    return RopeSpec(theta=float(metadata.get(f"{architecture}.rope.freq_base", 10000.0)), linear_factor=float(factor))


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise UnsupportedModel(f"this model has {what}, which is not supported")
