"""The served model as a Hugging Face directory, so that `transformers` runs the very same weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

HF_NAMES = {
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


def export_model(name: str, cache: Path) -> Path:
    """The directory of a model; a GGUF of the Llama family is converted to bfloat16 once and kept in the cache."""
    from engine.config import EngineConfig
    from engine.model import open_files, revision

    config = EngineConfig(model=name, cache=cache)
    files = open_files(config)
    target = cache / "bench" / revision(config, files)
    if (target / "config.json").exists():
        return target
    if files.spec.architecture != "llama":
        raise SystemExit(f"the benchmark converts models of the Llama family, not {files.spec.architecture}")
    half = target.with_suffix(".part")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    _write_text(files.text, half)
    _write_weights(files, half)
    half.rename(target)
    return target


def _write_text(text: object, directory: Path) -> None:
    from text.bundle import TextBundle

    assert isinstance(text, TextBundle)
    (directory / "tokenizer.json").write_text(text.tokenizer_json)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": text.bos_token,
        "eos_token": text.eos_token,
        "pad_token": text.eos_token,
        "chat_template": text.chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _write_weights(files: object, directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from engine.model.gguf_file import GGUFFile
    from engine.model.hf_dir import HFDirectory

    assert isinstance(files, GGUFFile | HFDirectory)
    spec = files.spec
    config = LlamaConfig(
        vocab_size=spec.vocab_rows,
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_size,
        intermediate_size=spec.inner_size,
        max_position_embeddings=spec.context_len,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=spec.tied_head,
        eos_token_id=list(files.text.eos_token_ids),
        dtype="bfloat16",
    )
    weights = files.weights()
    tensors = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["norm"]}
    if not spec.tied_head:
        tensors["lm_head.weight"] = weights["head"]
    for layer in range(spec.layers):
        for ours, theirs in HF_NAMES.items():
            tensors[f"model.layers.{layer}.{theirs}.weight"] = weights[f"{layer}.{ours}"]
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"the conversion misses {missing} and has too much: {unexpected}")
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(directory)
