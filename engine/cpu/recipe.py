"""How a model's tensors become the packed arrays of the CPU library: which are joined, how, and in what format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.model.spec import ModelSpec
from engine.model.weights import StoredTensor
from kernels.cpu.packing import INTERLEAVED_ROWS, Format

_BLOCK_FORMATS = {"Q4_0": Format.U4_G32, "Q4_1": Format.U4_G32, "Q4_K": Format.U4_G32, "Q8_0": Format.INT8_G32}
_WIDER = (Format.U4_G32, Format.INT8_G32, Format.BF16, Format.F32)
"""A matrix of parts in different formats takes the widest of them."""

_INT8 = {
    "o": Format.INT8,
    "gate_up": Format.INT8,
    "down": Format.INT8,
}
"""`int8` by kind of matrix; qkv, embedding and head aren't in it.

What a matrix in 8 bits adds to the variance of the logprobs, in thousandths (SmolLM2-135M; bf16 adds 0.4 in all, and
all together may add some 9 for the greedy agreement that is asked of int8):

              INT8  INT8_G32  share of the step's time
    qkv        5.9      3.2    9 %
    o          0.8             6 %
    gate_up    4.0      2.2   35 %
    down       4.1      1.8   17 %
    head       5.7      1.8   17 %

So qkv, small and dear, stays as it is; and the head can, because its screen spares the greedy rows most of it.
"""
RECIPE_VERSION = 2
"""Rises whenever other formats are chosen for the same tensors: part of a cache file's key."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One packed matrix [outputs, inputs]: tensors of the same inputs, joined."""

    name: str
    parts: tuple[str, ...]
    outputs: int
    inputs: int
    bias: bool = False
    gated: bool = False
    """Two parts, gate and up, whose rows alternate in runs so that each tile holds both of the same outputs."""

    @property
    def kind(self) -> str:
        """The same in all layers."""
        return self.name.rpartition(".")[2]


def unserved(spec: ModelSpec) -> str | None:
    """What a model has that the library lacks; None if there is nothing."""
    has = {
        "layers with different windows": len(spec.windows) > 1,
        "learned positions": spec.rope is None,
        "different rotary positions in its layers": spec.local_rope is not None,
        "rotary positions on a part of a head": spec.rope is not None and spec.rope.rotated is not None,
        "soft caps": spec.score_cap is not None or spec.logit_cap is not None,
        "other norms than RMSNorm before attention and MLP": spec.norm != "rms"
        or spec.norm_from_one
        or spec.post_norms,
        "another MLP than a gated one with SiLU": spec.activation != "silu" or not spec.gated,
        "a scaled embedding": spec.embedding_scale != 1.0,
        "a mixture of experts": spec.experts is not None,
    }
    return next((f"the model has {what}" for what, holds in has.items() if holds), None)


def recipes(spec: ModelSpec, vocab_size: int, quantization: str) -> Iterator[Recipe]:
    """The matrices of a model. The head is cut to the ids that may be sampled; if it is tied, the embedding serves.

    The screen is the head once more, in 8 bits (`kernels.cpu.screen`); the blocks of a GGUF file do without.
    """
    hidden, queries = spec.hidden_size, spec.heads * spec.head_size
    both = queries + 2 * spec.kv_heads * spec.head_size
    gated = 2 * (-(-spec.inner_size // INTERLEAVED_ROWS) * INTERLEAVED_ROWS)
    for i in range(spec.layers):
        yield Recipe(f"{i}.qkv", (f"{i}.q", f"{i}.k", f"{i}.v"), both, hidden, spec.qkv_bias)
        yield Recipe(f"{i}.o", (f"{i}.o",), hidden, queries, spec.output_bias)
        yield Recipe(f"{i}.gate_up", (f"{i}.gate", f"{i}.up"), gated, hidden, spec.mlp_bias, gated=True)
        yield Recipe(f"{i}.down", (f"{i}.down",), hidden, spec.inner_size, spec.mlp_bias)
    yield Recipe("embedding", ("embedding",), spec.vocab_rows, hidden)
    if not spec.tied_head:
        yield Recipe("head", ("head",), vocab_size, hidden)
    if quantization != "gguf":
        yield Recipe("screen", ("embedding" if spec.tied_head else "head",), vocab_size, hidden)


def norm_names(spec: ModelSpec) -> Iterator[str]:
    """The norms, which stay float32."""
    for i in range(spec.layers):
        yield from (f"{i}.attn_norm", f"{i}.mlp_norm")
        if spec.qk_norm:
            yield from (f"{i}.q_norm", f"{i}.k_norm")
    yield "norm"


def choose_format(recipe: Recipe, parts: list[StoredTensor], dtype: str, quantization: str) -> Format:
    """The packed format of a matrix: `gguf` keeps its parts' blocks, or the next wider form that there is of them."""
    if recipe.kind == "screen":
        return Format.INT8
    plain = Format.F32 if dtype == "float32" or parts[0].shape[1] % 2 else Format.BF16
    if quantization == "none":
        return plain
    if quantization == "int8":
        return _INT8.get(recipe.kind, plain)
    formats = [plain if part.is_plain else _BLOCK_FORMATS.get(part.kind, Format.INT8_G32) for part in parts]
    return max(formats, key=_WIDER.index)
