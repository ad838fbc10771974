"""The weights of a GGUF file. No torch here."""

from __future__ import annotations

from engine.model.gguf_header import GGUFHeader
from engine.model.spec import ModelSpec
from engine.model.weights import StoredTensor

_LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_NAMES = {
    "embedding": "token_embd.weight",
    "head": "output.weight",
    "norm": "output_norm.weight",
    "rope_factors": "rope_freqs.weight",
}


class GGUFWeights:
    """`engine.model.weights.Weights` over a GGUF file."""

    def __init__(self, header: GGUFHeader, spec: ModelSpec) -> None:
        self._header = header
        self._spec = spec

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and file_name(name) in self._header.tensors

    def __getitem__(self, name: str) -> StoredTensor:
        tensor = self._header.stored(file_name(name))
        part = name.partition(".")[2].removesuffix(".bias")
        if self._spec.architecture == "llama" and part in ("q", "k"):
            return tensor.unpermuted(self._spec.heads if part == "q" else self._spec.kv_heads)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return self._header.tensors[file_name(name)].shape


def file_name(name: str) -> str:
    """The name in a GGUF file of a tensor with a canonical name."""
    if name in _NAMES:
        return _NAMES[name]
    layer, part, *bias = name.split(".")
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{'bias' if bias else 'weight'}"
