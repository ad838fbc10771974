"""What a draft model brings: tokens per second with and without one, on weights that make it as good as is asked for.

    python -m bench.draft [--layers 24] [--draft-layers 3] [--damping 0 0.05 1] [--requests 1 4]

The target is a random Llama, the draft its first layers alone. The layers behind them are damped: at 0 they add nothing
and every draft comes true, at 1 the draft knows nothing of them. So this shows what the mechanism can bring and what it
costs where it brings nothing, and not how good any draft model is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from engine import LLM, SamplingParams
from engine.fake import fake_text

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_SIZE = 768, 2048, 12, 4, 64
EMBEDDING = 0.1
"""Deviation of its elements: small, or all that a token says is itself."""
MAX_TOKENS = 96


def write_model(directory: Path, layers: int, damped_from: int, damping: float) -> Path:
    """A Llama of so many layers; those from `damped_from` on add `damping` times what they would."""
    directory.mkdir(parents=True)
    text, draw = fake_text(), np.random.default_rng(0)
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_SIZE, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_SIZE),
        "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    ones = np.ones(HIDDEN, np.float16)
    tensors = {
        "model.embed_tokens.weight": (draw.normal(size=(text.vocab_size, HIDDEN)) * EMBEDDING).astype(np.float16)
    }
    tensors["model.norm.weight"] = ones
    for layer in range(layers):
        for name, shape in shapes.items():
            adds = name in ("self_attn.o_proj", "mlp.down_proj")
            scale = shape[1] ** -0.5 * (damping if adds and layer >= damped_from else 1.0)
            weight = draw.standard_normal(shape, dtype=np.float32) * np.float32(scale)
            tensors[f"model.layers.{layer}.{name}.weight"] = weight.astype(np.float16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = ones
    save_file(tensors, str(directory / "model.safetensors"))
    (directory / "tokenizer.json").write_text(text.tokenizer_json)
    write_config(directory, layers, text.vocab_size)
    return directory


def write_config(directory: Path, layers: int, vocab_size: int) -> None:
    """`config.json` of a model whose files may hold more layers."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": vocab_size, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def shallow(model: Path, layers: int, vocab_size: int) -> Path:
    """The same files, read as those of a model of fewer layers."""
    directory = model.with_name(f"{model.name}-draft")
    directory.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (directory / name).symlink_to(model / name)
    write_config(directory, layers, vocab_size)
    return directory


def measured(model: Path, draft: Path | None, requests: int, cache: Path) -> tuple[float, float, list[tuple[int, ...]]]:
    """Tokens per second, the share of drafts that came true, and the tokens."""
    prompts = [tuple(97 + (7 * n + i * i) % 26 for i in range(24 + n)) for n in range(requests)]
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, seed=1, ignore_eos=True)
    guess = 0 if draft is None else 4
    with LLM(
        model, cache, max_seq_len=256, num_speculative_tokens=guess, speculative_model=draft and str(draft)
    ) as llm:
        llm.generate(prompts, params)
        before, began_s = llm._engine.stats(), time.perf_counter()
        outputs = llm.generate(prompts, params)
        took_s, stats = time.perf_counter() - began_s, llm._engine.stats()
    drafted = stats.drafted_tokens - before.drafted_tokens
    right = (stats.accepted_tokens - before.accepted_tokens) / drafted if drafted else 0.0
    return requests * MAX_TOKENS / took_s, right, [output.token_ids for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--draft-layers", type=int, default=3)
    parser.add_argument("--damping", type=float, nargs="+", default=[0.0, 0.05, 1.0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4])
    asked = parser.parse_args()
    print(f"{'damping':>8} {'requests':>8} {'plain tok/s':>12} {'drafted tok/s':>14} {'ratio':>6} {'came true':>10}")
    for damping in asked.damping:
        with tempfile.TemporaryDirectory(prefix="headrace-draft-") as place:
            model = write_model(Path(place) / "model", asked.layers, asked.draft_layers, damping)
            draft = shallow(model, asked.draft_layers, fake_text().vocab_size)
            for requests in asked.requests:
                plain, _, expected = measured(model, None, requests, Path(place))
                drafted, right, found = measured(model, draft, requests, Path(place))
                assert found == expected, "a draft changed the output"
                print(
                    f"{damping:8g} {requests:8d} {plain:12.1f} {drafted:14.1f} {drafted / plain:6.2f} {right:10.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
