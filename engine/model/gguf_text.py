"""The text side of a GGUF file: its byte-level BPE as a `tokenizers` JSON, its template, its ends. No torch here.

A GGUF file names its pre-tokenizer and leaves the rest to the reader: each entry of `PRE_TOKENIZERS`
restates what the original tokenizer of that family does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gguf

from engine.model.spec import UnsupportedModel
from text.bundle import TextBundle

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
_QWEN2_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST

TURN_ENDS = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>", "<|endofturn|>"}
)
"""Control tokens that end a text in every model that has them."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a family of tokenizers cuts a text into words."""

    digits: bool = False
    """Each digit is a word of its own, cut before all else."""
    words: str | None = None
    """A regular expression; None is GPT-2's."""
    nfc: bool = False
    ignore_merges: bool = False
    """A word that is in the vocabulary is one token, whatever the merges say."""
    add_bos: bool = False
    """What holds if the file doesn't say."""


_LLAMA3 = PreTokenizer(words=_LLAMA3_WORDS, ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(words=_QWEN2_WORDS, nfc=True)
PRE_TOKENIZERS = {
    "default": PreTokenizer(),
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def text_from_gguf(metadata: Mapping[str, Any]) -> TextBundle:
    """Everything that the file says of text."""
    kind, family = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(family)
    if kind != "gpt2" or pre is None:
        raise UnsupportedModel(
            f"this GGUF file has a tokenizer of kind {kind!r}, pre-tokenizer {family!r}; supported are kind 'gpt2' "
            f"with {', '.join(PRE_TOKENIZERS)}. Use the model's Hugging Face directory instead."
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [gguf.TokenType.NORMAL] * len(tokens)
    bos, eos = (_token(metadata, tokens, name) for name in ("bos", "eos"))
    return TextBundle(
        tokenizer_json=json.dumps(
            _tokenizer(pre, tokens, types, metadata["tokenizer.ggml.merges"]), ensure_ascii=False
        ),
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=_eos_token_ids(metadata, tokens, types),
        add_bos=bos is not None and bool(metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos)),
        vocab_size=max((i for i, kind in enumerate(types) if kind != gguf.TokenType.UNUSED), default=-1) + 1,
    )


def _token(metadata: Mapping[str, Any], tokens: list[str], name: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[index] if index is not None else None


def _eos_token_ids(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[int, ...]:
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    named = {int(metadata[key]) for key in keys if key in metadata}
    control = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
    known = {i for i, token in enumerate(tokens) if types[i] in control and token in TURN_ENDS}
    return tuple(sorted(named | known))


def _tokenizer(pre: PreTokenizer, tokens: list[str], types: list[int], merges: list[str]) -> dict[str, Any]:
    """The serialisation of a `tokenizers.Tokenizer`."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splits: list[dict[str, Any]] = []
    if pre.digits:
        splits.append({"type": "Digits", "individual_digits": True})
    if pre.words is not None:
        splits.append({"type": "Split", "pattern": {"Regex": pre.words}, "behavior": "Isolated", "invert": False})
    splits.append(byte_level | {"use_regex": pre.words is None})
    added = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags, "special": types[i] == gguf.TokenType.CONTROL}
            for i, token in enumerate(tokens)
            if types[i] in added
        ],
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": {token: i for i, token in enumerate(tokens) if types[i] != gguf.TokenType.UNUSED},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
