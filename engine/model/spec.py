"""What a decoder is made of. No torch here.

One decoder serves all families: where they differ, a field says which of a few ways a model takes.
`families` fills it from a Hugging Face configuration, `gguf_spec` from the metadata of a GGUF file.
Whatever would change the result and isn't here is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


MOST = 2**31
"""Of each number of a model's structure."""
MOST_LAYERS = 4096


class UnsupportedModel(ValueError):
    """The model needs something that this engine doesn't have; the message says what."""


class ForeignModel(UnsupportedModel):
    """The decoder doesn't know how this model works; other code may."""


def require(holds: bool, what: str) -> None:
    """Raise ForeignModel for a model that has `what`, unless `holds`."""
    if not holds:
        raise ForeignModel(f"this model has {what}, which is not supported")


def layer_count(said: object) -> int:
    """The number of layers that a file says its model has, before anything is made for each of them."""
    layers = int(str(said))
    if not 1 <= layers <= MOST_LAYERS:
        raise UnsupportedModel(f"the model has from 1 to {MOST_LAYERS} layers, not {layers}")
    return layers


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's stretch of the low frequencies: `rope_scaling` of type `llama3`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """A ramp between frequencies that stay and those that are divided: `rope_scaling` of type `yarn`."""

    factor: float
    original_context_len: int
    fast_turns: float = 32.0
    """Components that turn so often within the original context stay."""
    slow_turns: float = 1.0
    """Those that turn less often than this are divided by the factor."""
    whole: bool = True
    """Whether the ramp begins and ends at whole components."""


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Divisors of each frequency, others for long contexts than for short ones: `rope_scaling` of type `longrope`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context_len: int
    """Contexts up to it are short."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding."""

    theta: float
    linear_factor: float = 1.0
    """Positions are divided by it."""
    scaling: Llama3Scaling | YarnScaling | LongRopeScaling | None = None
    amplitude: float = 1.0
    """Cosines and sines are multiplied by it."""
    rotated: int | None = None
    """Components of each head that are rotated, the first; None for all."""

    def __post_init__(self) -> None:
        for name in ("theta", "linear_factor", "amplitude"):
            if not 0 < getattr(self, name) < math.inf:
                raise UnsupportedModel(f"the rotary positions' {name} is {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """An MLP of many, of which a router chooses a few for each token."""

    count: int
    chosen: int
    inner_size: int
    """Width of each."""
    normalised: bool = True
    """Whether the weights of the chosen ones add up to one."""
    dense_layers: frozenset[int] = frozenset()
    """Layers with one MLP of the model's own width instead."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The structure of one model: pre-norm decoder layers of attention and an MLP, with what families vary.

    Layers are of two kinds: global ones see the whole context, local ones a window of it.
    """

    architecture: str
    """The family: `llama`, `gemma2`."""
    vocab_rows: int
    """Rows of the embedding; the tokenizer may have fewer ids."""
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner_size: int
    """Width of the MLP."""
    context_len: int
    norm_eps: float
    rope: RopeSpec | None
    """None: a learned vector for each position is added to the embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    local_layers: frozenset[int] = frozenset()
    local_window: int | None = None
    """Tokens that a token sees in a local layer, itself included."""
    global_window: int | None = None
    """The same in a global layer; None is the whole context."""
    local_rope: RopeSpec | None = None
    """That of local layers, if it is another."""
    attention_scale: float | None = None
    """Of queries times keys; None is 1 / sqrt(head_size)."""
    score_cap: float | None = None
    """Attention scores are bent to stay below it."""
    logit_cap: float | None = None
    """Logits are bent to stay below it."""
    norm: Literal["rms", "layer"] = "rms"
    norm_from_one: bool = False
    """Whether files hold the weights of norms less one."""
    post_norms: bool = False
    """Whether what attention and MLP give is normalised before it is added."""
    activation: Activation = "silu"
    gated: bool = True
    """Whether the MLP multiplies two halves, the gate activated."""
    embedding_scale: float = 1.0
    experts: ExpertsSpec | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_rows",
            "hidden_size",
            "layers",
            "heads",
            "kv_heads",
            "head_size",
            "inner_size",
            "context_len",
        ):
            if not 1 <= getattr(self, name) <= MOST:
                raise UnsupportedModel(f"the model's {name} is {getattr(self, name)}")
        if not 0 <= self.norm_eps < 1:
            raise UnsupportedModel(f"the model's norm_eps is {self.norm_eps}")
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"{self.heads} attention heads can't share {self.kv_heads} key/value heads evenly")
        if self.rope is not None and self.head_size % 2:
            raise UnsupportedModel(f"rotary positions need an even head size, this model's is {self.head_size}")
        for rope in (self.rope, self.local_rope):
            if rope is not None and rope.rotated is not None and (rope.rotated % 2 or rope.rotated > self.head_size):
                raise UnsupportedModel(f"{rope.rotated} of {self.head_size} components of a head can't be rotated")
        for window in (self.local_window, self.global_window):
            if window is not None and window < 1:
                raise UnsupportedModel(f"a window has one token at least, not {window}")
        if self.local_layers and self.local_window is None:
            raise UnsupportedModel("the model has layers with a window, and doesn't say how wide it is")
        if self.experts is not None and not 1 <= self.experts.chosen <= self.experts.count:
            raise UnsupportedModel(f"{self.experts.chosen} of {self.experts.count} experts can't be chosen")

    @property
    def scale(self) -> float:
        """Of queries times keys."""
        return self.attention_scale if self.attention_scale is not None else 1 / math.sqrt(self.head_size)

    def window(self, layer: int) -> int | None:
        """Tokens that a token sees in a layer, itself included; None for its whole context."""
        return self.local_window if layer in self.local_layers else self.global_window

    def rope_of(self, layer: int) -> RopeSpec | None:
        """The rotary positions of a layer."""
        return self.local_rope if layer in self.local_layers and self.local_rope is not None else self.rope

    @property
    def windows(self) -> frozenset[int | None]:
        """The windows that there are."""
        return frozenset(map(self.window, range(self.layers)))

    @property
    def reach_tokens(self) -> int | None:
        """Tokens that the widest layer sees of those before a token, with itself; None if one sees all."""
        reaches = [window for window in self.windows if window is not None]
        return max(reaches) if None not in self.windows else None

    def narrowed(self, window: int | None) -> ModelSpec:
        """The same model, no layer of which sees more than `window` tokens."""
        if window is None:
            return self
        local = None if self.local_window is None else min(window, self.local_window)
        return replace(self, local_window=local, global_window=min(window, self.global_window or window))

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is one of many."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def activation_bytes(self, tokens: int, rows: int, element_bytes: int) -> int:
        """The most that a step of so many tokens, of which so many rows are sampled, holds at once beside the KV.

        Per token: the residual in float32, and of the layer's attention or its MLP, whichever is wider, what goes
        in and what comes out. Per sampled row: its logits in float32, twice, for whoever changes them. Experts
        work one after the other, so at most on all tokens; what they give is summed in float32.
        """
        residual = 4 * self.hidden_size
        heads = (self.heads + 2 * self.kv_heads) * self.head_size
        attention = heads * element_bytes + 2 * heads * 4 + self.heads * self.head_size * element_bytes
        mlp = 3 * self.inner_size * element_bytes
        if self.experts is not None:
            chosen = 3 * self.experts.inner_size * element_bytes + self.hidden_size * (8 + element_bytes)
            mlp = max(mlp, chosen + self.experts.count * 8)
        layer = 2 * self.hidden_size * element_bytes + max(attention, mlp)
        return tokens * (residual + layer) + rows * 2 * 4 * self.vocab_rows

    def kv_bytes_per_token(self, element_bytes: int, scale_bytes: int = 0) -> int:
        """Keys and values of one token over all layers, with the scale of each head if they are quantised."""
        return 2 * self.layers * self.kv_heads * (self.head_size * element_bytes + scale_bytes)
