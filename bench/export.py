"""The served model as a Hugging Face directory, so that `transformers` runs the very same weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.model import open_files, revision
from engine.model.gguf_file import GGUFFile
from engine.model.gguf_weights import GGUFWeights
from engine.model.hf_dir import HFDirectory
from engine.model.hf_names import LLAMA, Checkpoint
from engine.model.spec import ModelSpec, RopeSpec
from engine.model.tensors import to_torch
from text.bundle import TextBundle

LAYER_PARTS = ("attn_norm", "mlp_norm", "q", "k", "v", "o", "gate", "up", "down")


def export_model(name: str, cache: Path) -> Path:
    """A model's directory; a GGUF of the Llama family is converted to bfloat16 once and kept in the cache."""
    config = EngineConfig(model=name, cache=cache)
    files = open_files(config)
    if isinstance(files, HFDirectory):
        return files.path
    target = cache / "bench" / revision(config, files)
    if not target.exists():
        part = target.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _write_text(files.text, part)
        _write_weights(files, part)
        part.rename(target)
    return target


def _write_text(text: TextBundle, directory: Path) -> None:
    (directory / "tokenizer.json").write_text(text.tokenizer_json)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": text.bos_token,
        "eos_token": text.eos_token,
        "pad_token": text.eos_token,
        "chat_template": text.chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _write_weights(files: GGUFFile, directory: Path) -> None:
    spec = files.spec
    weights = GGUFWeights(files.header, spec)
    names = ["embedding", "norm", *([] if spec.tied_head else ["head"])]
    names += [f"{layer}.{part}" for layer in range(spec.layers) for part in LAYER_PARTS]
    model = LlamaForCausalLM(_llama_config(spec, files.text))
    state = model.state_dict()
    places = [(name, Checkpoint(LLAMA, spec, state).place(name)) for name in names]
    missing, unexpected = model.load_state_dict(
        {place.name: to_torch(weights[name]) for name, place in places if place is not None}, strict=False
    )
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"the conversion misses {missing} and has too much: {unexpected}")
    model.tie_weights()
    model.bfloat16().save_pretrained(directory)


def _llama_config(spec: ModelSpec, text: TextBundle) -> LlamaConfig:
    rope = spec.rope or RopeSpec(theta=0.0)
    if spec.architecture != "llama" or spec.qkv_bias or spec.mlp_bias or rope != RopeSpec(rope.theta):
        raise SystemExit("the benchmark converts plain models of the Llama family only; name a Hugging Face directory")
    return LlamaConfig(
        vocab_size=spec.vocab_rows,
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_size,
        intermediate_size=spec.inner_size,
        max_position_embeddings=spec.context_len,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        tie_word_embeddings=spec.tied_head,
        eos_token_id=list(text.eos_token_ids),
        dtype="bfloat16",
    )
