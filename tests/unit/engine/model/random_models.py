"""Small random models of each architecture, as directories that `save_pretrained` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCAB = 96
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""`rope_parameters` that stretch the low frequencies of so short a context."""
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 48,
}
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256}
PHI3 = {"hidden_size": 96, "pad_token_id": 0}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}),
    "llama-narrow-heads": ("Llama", {"num_key_value_heads": 6, "head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 20}),
    "mistral-window": ("Mistral", {"sliding_window": 11, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "head_dim": 8}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-biases": ("Qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-yarn": ("Qwen3", {"rope_parameters": YARN}),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"sliding_window": 13}),
    "gemma2-tight-caps": ("Gemma2", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 20}),
    "gemma3": ("Gemma3", {"sliding_window": 13, "sliding_window_pattern": 2}),
    "gemma3-stretched": (
        "Gemma3",
        {"sliding_window": 5, "num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "phi3": ("Phi3", {**PHI3, "sliding_window": 10}),
    "phi3-longrope": ("Phi3", {**PHI3, "rope_parameters": LONGROPE}),
    "phi3-partial": ("Phi3", {**PHI3, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "gpt2": ("GPT2", GPT2),
    "gpt2-inner": ("GPT2", {**GPT2, "n_inner": 100}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 20}),
    "qwen3-moe": ("Qwen3Moe", MOE),
    "qwen3-moe-sparse-step": ("Qwen3Moe", {**MOE, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3-moe-dense-layer": ("Qwen3Moe", {**MOE, "mlp_only_layers": [0]}),
}
"""Family and configuration. Windows are shorter than the contexts of the tests, and so is what the positions that are
stretched were made for."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


CLASSES = {
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    "Llama4": ("Llama4TextConfig", "Llama4ForCausalLM"),
}
"""Names of the configuration and the model where they don't follow from the family's."""


def save_random_model(parent: Path, family: str, max_shard_size: str = "1GB", **config: Any) -> tuple[Any, Path]:
    """The transformers model in float32, and its directory. The weights are large enough to make sharp logits."""
    import transformers

    torch.manual_seed(0)
    names = CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    kind, architecture = (getattr(transformers, name) for name in names)
    settings = kind(**(SIZES | config))
    settings._attn_implementation = "eager"  # the only one that knows soft caps
    model = architecture(settings).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(4)
    directory = parent / family
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    (directory / "tokenizer.json").write_text(tokenizer_json())
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<1>", "eos_token": "<2>"}))
    return model, directory


def tokenizer_json(vocab: int = VOCAB) -> str:
    """A tokenizer of words `<0>`, `<1>`, ... that stand for their own id."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"<{i}>": i for i in range(vocab)}, unk_token="<0>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.decoder = ByteLevel()
    return str(tokenizer.to_str())


def greedy_tokens(reference: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What `transformers` goes on with after each prompt, its end of text ignored."""
    outputs = []
    for prompt in prompts:
        with torch.inference_mode():
            whole = reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=new_tokens,
                min_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        outputs.append(whole[0, len(prompt) :].tolist())
    return outputs
