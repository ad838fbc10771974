"""A small model of random weights as a Hugging Face directory: bytes as its vocabulary, a template that can refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from engine.fake import fake_text

HIDDEN = 32
INNER = 48
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 16
CONTEXT_TOKENS = 512
REFUSED_CHAT = "refuse me"
"""A chat whose first message is this raises in the template."""
BROKEN_CHAT = "break me"
"""A chat whose first message is this divides by zero in the template."""
_TEMPLATE = (
    f"{{% if messages[0].content == '{REFUSED_CHAT}' %}}{{{{ raise_exception('no such chat') }}}}{{% endif %}}"
    f"{{% if messages[0].content == '{BROKEN_CHAT}' %}}{{{{ 1 // 0 }}}}{{% endif %}}"
)


def write_random_model(directory: Path, seed: int = 0) -> Path:
    """Write the files of a Llama of 4 layers, 32 wide; its logits are sharp enough that greedy text isn't one token."""
    directory.mkdir(parents=True, exist_ok=True)
    text = fake_text()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": text.vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": text.eos_token_ids[0],
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(_by_words(text.tokenizer_json))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": text.eos_token, "chat_template": _TEMPLATE + (text.chat_template or "")})
    )
    save_file(_tensors(np.random.default_rng(seed), text.vocab_size), str(directory / "model.safetensors"))
    return directory


def _by_words(tokenizer_json: str) -> str:
    """The tokenizer, dividing a text into words first: it remembers thousands of them, and whole prompts are longer."""
    tokenizer = json.loads(tokenizer_json)
    tokenizer["pre_tokenizer"]["use_regex"] = True
    return json.dumps(tokenizer)


def _tensors(draw: np.random.Generator, vocab_size: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    shapes = {"model.embed_tokens": (vocab_size, HIDDEN)}
    norms = ["model.norm"]
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        shapes |= {
            f"{layer}.self_attn.q_proj": (HEADS * HEAD_SIZE, HIDDEN),
            f"{layer}.self_attn.k_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{layer}.self_attn.v_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{layer}.self_attn.o_proj": (HIDDEN, HEADS * HEAD_SIZE),
            f"{layer}.mlp.gate_proj": (INNER, HIDDEN),
            f"{layer}.mlp.up_proj": (INNER, HIDDEN),
            f"{layer}.mlp.down_proj": (HIDDEN, INNER),
        }
    tensors = {
        f"{name}.weight": (2 * draw.standard_normal(shape) / math.sqrt(shape[1])).astype(np.float32)
        for name, shape in shapes.items()
    }
    return tensors | {f"{name}.weight": np.ones(HIDDEN, np.float32) for name in norms}
