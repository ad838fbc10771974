"""The families of models, as Hugging Face configurations describe them. No torch here.

A family is how its configuration reads as a `ModelSpec`, what it stands for where a file says nothing
(`hf_defaults`), and where its tensors lie (`hf_names`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.model import hf_defaults, hf_names
from engine.model.hf_names import Names
from engine.model.hf_rope import read_local_rope, read_rope
from engine.model.spec import (
    Activation,
    ExpertsSpec,
    ForeignModel,
    ModelSpec,
    UnsupportedModel,
    layer_count,
    require,
)

Config = Mapping[str, Any]
Fields = dict[str, Any]
"""Fields of `ModelSpec`."""

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Family:
    """One family."""

    name: str
    read: Callable[[Config], Fields]
    """What its models have beside what all have."""
    names: Names = hf_names.LLAMA
    defaults: Config = field(default_factory=dict)
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Its configurations' names for what others call by one name."""


def family_of(config: Config) -> Family:
    """The family of a configuration. Raises `ForeignModel` if it is none of these."""
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    known = ", ".join(FAMILIES)
    raise ForeignModel(f"architecture {', '.join(names) or 'unnamed'} is not supported; supported are {known}")


def spec_from_hf(config: Config) -> ModelSpec:
    """Read a Hugging Face `config.json`."""
    family = family_of(config)
    require(config.get("is_causal") is not False, "attention in both directions")
    config = {**family.defaults, **config, **config.get("text_config", {})}
    config |= {ours: config[theirs] for theirs, ours in family.synonyms.items()}
    if config.get("quantization_config") is not None:
        raise UnsupportedModel("weights quantised by another library (quantization_config) are not supported")
    heads = int(config["num_attention_heads"])
    common: Fields = {
        "vocab_rows": int(config["vocab_size"]),
        "hidden_size": int(config["hidden_size"]),
        "layers": layer_count(config["num_hidden_layers"]),
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_size": int(config.get("head_dim") or config["hidden_size"] // heads),
        "inner_size": int(config["intermediate_size"] or 4 * config["hidden_size"]),
        "context_len": int(config["max_position_embeddings"]),
        "norm_eps": float(config["rms_norm_eps"]),
        "tied_head": bool(config["tie_word_embeddings"]),
    }
    own = family.read(config)
    if "activation" not in own:
        own["activation"] = _activation(config["hidden_act"])
    if "rope" not in own:
        own["rope"] = read_rope(config, common["head_size"])
    return ModelSpec(architecture=family.name, **(common | own))


def _llama(config: Config) -> Fields:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def _mistral(config: Config) -> Fields:
    return _window_of_all(config)


def _qwen2(config: Config) -> Fields:
    return {"qkv_bias": True} | _qwen_window(config)


def _qwen3(config: Config) -> Fields:
    bias = bool(config.get("attention_bias", False))
    return {"qk_norm": True, "qkv_bias": bias, "output_bias": bias} | _qwen_window(config)


def _gemma(config: Config) -> Fields:
    name = config["hidden_act"]
    return _any_gemma(config, "gelu_pytorch_tanh" if name == "gelu" else name)  # as the first files have it


def _any_gemma(config: Config, activation: str) -> Fields:
    bias = bool(config.get("attention_bias", False))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "norm_from_one": True,
        "activation": _activation(activation),
        "embedding_scale": int(config["hidden_size"]) ** 0.5,
    }


def _gemma2(config: Config) -> Fields:
    require(not config.get("use_bidirectional_attention"), "attention in both directions")
    return {
        **_any_gemma(config, config["hidden_activation"] or "gelu_pytorch_tanh"),
        **_window(config, lambda layer: layer % 2 == 0),
        "post_norms": True,
        "attention_scale": float(config["query_pre_attn_scalar"]) ** -0.5,
        "score_cap": config["attn_logit_softcapping"],
        "logit_cap": config["final_logit_softcapping"],
    }


def _gemma3(config: Config) -> Fields:
    pattern = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
    rope, local = read_local_rope(config, int(config["head_dim"]))
    return {
        **_gemma2(config),
        **_window(config, lambda layer: (layer + 1) % pattern != 0),
        "qk_norm": True,
        "score_cap": None,  # its code doesn't look at it
        "rope": rope,
        "local_rope": local,
    }


def _phi3(config: Config) -> Fields:
    head_size = int(config["hidden_size"]) // int(config["num_attention_heads"])
    return _window_of_all(config) | {"rope": read_rope(config, head_size, may_be_partial=True)}


def _gpt2(config: Config) -> Fields:
    require(config["scale_attn_weights"], "attention scores that aren't scaled")
    require(not config["scale_attn_by_inverse_layer_idx"], "attention scores scaled by layer")
    return {
        "kv_heads": int(config["num_attention_heads"]),
        "head_size": int(config["hidden_size"]) // int(config["num_attention_heads"]),
        "rope": None,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "norm": "layer",
        "gated": False,
        "activation": _activation(config["activation_function"]),
    }


def _mixtral(config: Config) -> Fields:
    count, chosen = int(config["num_local_experts"]), int(config["num_experts_per_tok"])
    return _window_of_all(config) | {"experts": ExpertsSpec(count, chosen, int(config["intermediate_size"]))}


def _qwen3_moe(config: Config) -> Fields:
    layers, step = int(config["num_hidden_layers"]), int(config["decoder_sparse_step"])
    listed = config.get("mlp_only_layers") or []
    count = int(config.get("num_experts") or config["num_local_experts"])
    experts = ExpertsSpec(
        count,
        int(config["num_experts_per_tok"]),
        int(config["moe_intermediate_size"]),
        normalised=bool(config["norm_topk_prob"]),
        dense_layers=frozenset(i for i in range(layers) if i in listed or (i + 1) % step),
    )
    windows = _window_of_all(config) if config["use_sliding_window"] else {}
    return _qwen3({**config, "use_sliding_window": False}) | windows | {"experts": experts}


def _qwen_window(config: Config) -> Fields:
    """The first `max_window_layers` layers see all, unless `layer_types` says otherwise."""
    if not config["use_sliding_window"]:
        return {}
    first = int(config["max_window_layers"])
    return _window(config, lambda layer: layer >= first)


def _window(config: Config, is_local: Callable[[int], bool]) -> Fields:
    """The layers with a window: those that `layer_types` names, or else those that are local by the family's rule."""
    window = config.get("sliding_window")
    if window is None:
        return {}
    layers = range(int(config["num_hidden_layers"]))
    types = config.get("layer_types")
    local = frozenset(i for i in layers if (types[i] == "sliding_attention" if types else is_local(i)))
    return {"local_layers": local, "local_window": int(window)} if local else {}


def _window_of_all(config: Config) -> Fields:
    """The window of families that have one in all layers or in none, and no `layer_types`."""
    return _window({**config, "layer_types": None}, lambda layer: True)


def _activation(name: str) -> Activation:
    require(name in _ACTIVATIONS, f"activation {name!r}")
    return _ACTIVATIONS[name]


_GEMMA3 = Family("gemma3", _gemma3, hf_names.GEMMA2, hf_defaults.GEMMA3)
_GPT2_SYNONYMS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", _llama, defaults=hf_defaults.LLAMA),
    "MistralForCausalLM": Family("mistral", _mistral, defaults=hf_defaults.MISTRAL),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2, defaults=hf_defaults.QWEN2),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, defaults=hf_defaults.QWEN3),
    "LlamaModel": Family("llama", _llama, defaults=hf_defaults.LLAMA),
    "MistralModel": Family("mistral", _mistral, defaults=hf_defaults.MISTRAL),
    "Qwen2Model": Family("qwen2", _qwen2, defaults=hf_defaults.QWEN2),
    "Qwen3Model": Family("qwen3", _qwen3, defaults=hf_defaults.QWEN3),
    "GemmaForCausalLM": Family("gemma", _gemma, defaults=hf_defaults.GEMMA),
    "Gemma2ForCausalLM": Family("gemma2", _gemma2, hf_names.GEMMA2, hf_defaults.GEMMA2),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": Family("phi3", _phi3, hf_names.PHI3, hf_defaults.PHI3),
    "GPT2LMHeadModel": Family("gpt2", _gpt2, hf_names.GPT2, hf_defaults.GPT2, _GPT2_SYNONYMS),
    "MixtralForCausalLM": Family("mixtral", _mixtral, hf_names.MIXTRAL, hf_defaults.MIXTRAL),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _qwen3_moe, hf_names.QWEN3_MOE, hf_defaults.QWEN3_MOE),
}
"""By the name of the architecture; those without a head are for embeddings."""
