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


def save_random_model(parent: Path, family: str, max_shard_size: str = "1GB", **config: Any) -> tuple[Any, Path]:
    """The transformers model in float32, and its directory. The weights are large enough to make sharp logits."""
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, f"{family}Config")(**(SIZES | config))
    model = getattr(transformers, f"{family}ForCausalLM")(settings).eval()
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
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"<{i}>": i for i in range(vocab)}, unk_token="<0>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return str(tokenizer.to_str())
