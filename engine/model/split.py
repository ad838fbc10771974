"""One model over several ranks: which heads, columns and rows each has. No torch here.

    q, k, v, gate, up    by rows [out, in]: each rank computes some heads, and some of the MLP's width
    o, down              by columns: what each rank computes of them is a summand; the ranks add theirs up
    embedding, head      by rows, so by tokens: of an embedding the others add zeros, a head's logits are gathered
    adapters             as the matrices that they belong to
    all else             whole on every rank; biases behind a sum on the first rank alone

The scheme is Megatron's (Shoeybi et al., arXiv:1909.08053). Experts are split as every MLP is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.model.adapter import Adapter
from engine.model.spec import ModelSpec, UnsupportedModel
from engine.model.weights import StoredTensor, Weights

BY_ROWS = frozenset({"q", "k", "v", "gate", "up"})
BY_COLUMNS = frozenset({"o", "down"})
BY_TOKENS = frozenset({"embedding", "head"})


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's share of a model."""

    rank: int
    ranks: int

    def spec(self, whole: ModelSpec) -> ModelSpec:
        """The structure of what this rank computes. Raises UnsupportedModel if the model can't be divided so.

        With fewer key/value heads than ranks, several ranks have the same one.
        """
        check_divisible(whole, self.ranks)
        experts = whole.experts
        return replace(
            whole,
            heads=whole.heads // self.ranks,
            kv_heads=max(1, whole.kv_heads // self.ranks),
            inner_size=whole.inner_size // self.ranks,
            experts=experts and replace(experts, inner_size=experts.inner_size // self.ranks),
        )

    def tokens(self, rows: int) -> range:
        """Its rows of an embedding or a head of `rows` rows; the last ranks may lack some."""
        each = tokens_of_each(rows, self.ranks)
        return range(min(rows, self.rank * each), min(rows, (self.rank + 1) * each))

    def slice_of(self, size: int) -> slice:
        """Its share of a dimension that all ranks divide evenly."""
        each = size // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)

    def kv_slice(self, whole: ModelSpec) -> slice:
        """Its rows of k and v."""
        if whole.kv_heads >= self.ranks:
            return self.slice_of(whole.kv_heads * whole.head_size)
        head = self.rank * whole.kv_heads // self.ranks
        return slice(head * whole.head_size, (head + 1) * whole.head_size)


class SplitWeights:
    """`Weights` of one rank: of each tensor its share."""

    def __init__(self, source: Weights, whole: ModelSpec, part: Part) -> None:
        self._source = source
        self._whole = whole
        self._part = part

    def __contains__(self, name: object) -> bool:
        return name in self._source

    def __getitem__(self, name: str) -> StoredTensor:
        stored, part = self._source[name], self._part
        stem = name.removesuffix(".bias")
        kind = stem.rpartition(".")[2]
        if kind in BY_TOKENS:
            mine = part.tokens(stored.shape[0])
            return stored.some_rows(slice(mine.start, mine.stop))
        if kind in ("k", "v"):
            return stored.some_rows(part.kv_slice(self._whole))
        if kind in BY_ROWS:
            return stored.some_rows(part.slice_of(stored.shape[0]))
        if kind not in BY_COLUMNS:
            return stored
        if name == stem:
            return stored.some_columns(part.slice_of(stored.shape[1]))
        return stored if part.rank == 0 else StoredTensor("F32", stored.shape, np.zeros(stored.shape, np.float32))

    def shape(self, name: str) -> tuple[int, ...]:
        return self[name].shape


def split_adapter(adapter: Adapter, whole: ModelSpec, part: Part) -> Adapter:
    """One rank's share: of each pair the side that its matrix is divided by. What it adds before a sum is a summand."""
    pairs = {}
    for name, pair in adapter.pairs.items():
        kind = name.rpartition(".")[2]
        if kind in BY_COLUMNS:
            mine = part.slice_of(pair.shrink.shape[1])
            pairs[name] = replace(pair, shrink=pair.shrink.some_columns(mine))
        else:
            mine = part.kv_slice(whole) if kind in ("k", "v") else part.slice_of(pair.expand.shape[0])
            pairs[name] = replace(pair, expand=pair.expand.some_rows(mine))
    return replace(adapter, pairs=pairs)


def tokens_of_each(rows: int, ranks: int) -> int:
    """The most rows of an embedding or a head that a rank has: with zeros behind, all have so many."""
    return -(-rows // ranks)


def check_divisible(spec: ModelSpec, ranks: int) -> None:
    """Raise UnsupportedModel unless heads and widths can be divided evenly among so many ranks."""
    if not _divides(spec, ranks):
        possible = [n for n in range(2, spec.heads + 1) if _divides(spec, n)]
        instead = (
            f"these sizes divide it: {', '.join(map(str, possible))}" if possible else "it runs on one device only"
        )
        widths = " and ".join(f"of {width}" for width in _widths(spec))
        raise UnsupportedModel(
            f"tensor_parallel_size={ranks} doesn't divide this model ({spec.heads} attention heads,"
            f" {spec.kv_heads} key/value heads, MLPs {widths}): {instead}"
        )


def _divides(spec: ModelSpec, ranks: int) -> bool:
    shares_heads = spec.kv_heads % ranks == 0 or ranks % spec.kv_heads == 0
    return shares_heads and not any(width % ranks for width in (spec.heads, *_widths(spec)))


def _widths(spec: ModelSpec) -> list[int]:
    """Of the MLPs that the model has."""
    layers = range(spec.layers)
    dense = [] if all(map(spec.has_experts, layers)) else [spec.inner_size]
    return dense + ([spec.experts.inner_size] if spec.experts is not None else [])
