"""Where the tensors of each family lie in a Hugging Face checkpoint. No torch here."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from engine.model.spec import ModelSpec

PREFIXES = ("model.", "", "language_model.model.", "model.language_model.", "transformer.")
"""What may stand before all names, but the head's."""
HEADS = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of a file, or some rows of it; a matrix may lie there with its inputs first."""

    name: str
    rows: slice | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """A family's names for the canonical ones of `engine.model.weights.Weights`."""

    parts: Mapping[str, str]
    """Of a layer."""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors that hold several parts of a layer, one behind the other."""
    expert: Mapping[str, str] = field(default_factory=dict)
    """Of an expert of a layer, with `{}` for its number."""
    model: Mapping[str, str] = field(default_factory=lambda: {"embedding": "embed_tokens", "norm": "norm"})
    layers: str = "layers"
    transposed: bool = False
    """Whether the matrices of the layers lie with their inputs first."""


class Checkpoint:
    """The places of one checkpoint's tensors by canonical name."""

    def __init__(self, names: Names, spec: ModelSpec, files: Container[str]) -> None:
        """`files` holds the names of all tensors that there are."""
        self._names = names
        self._spec = spec
        embedding = names.model["embedding"]
        self._prefix = next((p for p in PREFIXES if f"{p}{embedding}.weight" in files), PREFIXES[0])
        self._head = next((name for name in HEADS if name in files), HEADS[0])

    def place(self, name: str) -> Place | None:
        """Where a tensor should lie; None if the family has none of that name."""
        stem, kind = (name.removesuffix(".bias"), "bias") if name.endswith(".bias") else (name, "weight")
        layer, _, part = stem.partition(".")
        if stem == "head":
            return Place(self._head)
        if not part:
            return Place(f"{self._prefix}{self._names.model[stem]}.{kind}") if stem in self._names.model else None
        where = self._in_layer(part)
        if where is None:
            return None
        inner, rows = where
        transposed = self._names.transposed and kind == "weight" and not part.endswith("norm")
        return Place(f"{self._prefix}{self._names.layers}.{layer}.{inner}.{kind}", rows, transposed)

    def _in_layer(self, part: str) -> tuple[str, slice | None] | None:
        """The tensor of a layer that holds a part, and which of its rows."""
        names = self._names
        if part.startswith("experts."):
            _, number, of_expert = part.split(".")
            return names.expert[of_expert].format(number), None
        for whole, parts in names.joined.items():
            if part in parts:
                first = sum(self._rows(other) for other in parts[: parts.index(part)])
                return whole, slice(first, first + self._rows(part))
        return (names.parts[part], None) if part in names.parts else None

    def _rows(self, part: str) -> int:
        spec = self._spec
        heads = {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}.get(part)
        return spec.inner_size if heads is None else heads * spec.head_size


_ATTENTION = {
    "attn_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
}
_MLP = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
_MLP_NORM = {"mlp_norm": "post_attention_layernorm"}

LLAMA = Names(_ATTENTION | _MLP_NORM | _MLP)
GEMMA2 = Names(
    {
        **_ATTENTION,
        **_MLP,
        "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)
PHI3 = Names(
    _ATTENTION | _MLP_NORM | _MLP,
    joined={"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")},
)
GPT2 = Names(
    {
        "attn_norm": "ln_1",
        "o": "attn.c_proj",
        "mlp_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
    joined={"attn.c_attn": ("q", "k", "v")},
    model={"embedding": "wte", "positions": "wpe", "norm": "ln_f"},
    layers="h",
    transposed=True,
)
MIXTRAL = Names(
    _ATTENTION | _MLP_NORM | {"router": "block_sparse_moe.gate"},
    expert={
        name: f"block_sparse_moe.experts.{{}}.{file}" for name, file in {"gate": "w1", "up": "w3", "down": "w2"}.items()
    },
)
QWEN3_MOE = Names(
    _ATTENTION | _MLP_NORM | _MLP | {"router": "mlp.gate"},
    expert={name: f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
)
