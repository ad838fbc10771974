"""The shape that each tensor of a model has to have. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from engine.model.spec import ModelSpec, UnsupportedModel
from engine.model.weights import Weights


def check_shapes(spec: ModelSpec, weights: Weights) -> None:
    """Raise UnsupportedModel unless the files hold every tensor of the model, as large as its configuration says.

    The first one at fault ends it, so a configuration that claims a billion layers costs no more than the files have.
    """
    for name, shape in shapes(spec):
        if name not in weights:
            raise UnsupportedModel(f"the model's files lack the tensor {name}, which its configuration asks for")
        found = weights.shape(name)
        if found != shape:
            raise UnsupportedModel(f"the tensor {name} has the shape {found}, and the configuration says {shape}")


def shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The canonical name and the shape of every tensor that the model is made of."""
    hidden = spec.hidden_size
    yield "embedding", (spec.vocab_rows, hidden)
    if spec.rope is None:
        yield "positions", (spec.context_len, hidden)
    if not spec.tied_head:
        yield "head", (spec.vocab_rows, hidden)
    yield from _norm(spec, "norm")
    for i in range(spec.layers):
        yield from _attention(spec, f"{i}")
        yield from _norm(spec, f"{i}.mlp_norm")
        if spec.post_norms:
            yield from _norm(spec, f"{i}.attn_post_norm")
            yield from _norm(spec, f"{i}.mlp_post_norm")
        if spec.experts is None or not spec.has_experts(i):
            yield from _mlp(spec, f"{i}", spec.inner_size)
            continue
        yield f"{i}.router", (spec.experts.count, hidden)
        for number in range(spec.experts.count):
            yield from _mlp(spec, f"{i}.experts.{number}", spec.experts.inner_size)


def _attention(spec: ModelSpec, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, keys = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    yield from _norm(spec, f"{prefix}.attn_norm")
    if spec.qk_norm:
        yield f"{prefix}.q_norm", (spec.head_size,)
        yield f"{prefix}.k_norm", (spec.head_size,)
    for part, rows in {"q": queries, "k": keys, "v": keys}.items():
        yield from _matrix(f"{prefix}.{part}", rows, spec.hidden_size, spec.qkv_bias)
    yield from _matrix(f"{prefix}.o", spec.hidden_size, queries, spec.output_bias)


def _mlp(spec: ModelSpec, prefix: str, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part in ("gate", "up") if spec.gated else ("up",):
        yield from _matrix(f"{prefix}.{part}", inner, spec.hidden_size, spec.mlp_bias)
    yield from _matrix(f"{prefix}.down", spec.hidden_size, inner, spec.mlp_bias)


def _matrix(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name, (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(spec: ModelSpec, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name, (spec.hidden_size,)
    if spec.norm == "layer":
        yield f"{name}.bias", (spec.hidden_size,)
