"""One decoder for all models of `ModelSpec`, over the kernels protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.mlp import MLP
from engine.model.norms import Norm
from engine.model.projection import Projection
from engine.model.spec import ModelSpec
from engine.parallel.group import Exchange, Group
from kernels.adapters import AdapterRows
from kernels.protocol import Attention, AttentionMetadata, Kernels, Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its weights, packed for the device, and what is its own in attention."""

    attn_norm: Norm
    qkv: Projection
    attention: Attention
    cos_sin: Tensor
    """[most positions, 2, R / 2] float32: the angles by which the first R components of heads are rotated."""
    output: Projection
    mlp_norm: Norm
    mlp: MLP
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attn_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model, ready for its device."""

    embedding: Tensor
    """[V, hidden]; of one of several ranks its own tokens' rows"""
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    positions: Tensor | None = None
    """[most positions, hidden]: learned ones"""
    first_token: int = 0
    """Token of the embedding's first row."""


class Decoder:
    """Turns a step's tokens into logits; holds weights and no state.

    With a `group`, its heads, columns and rows are one rank's of several, which meet where `exchanges` says.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        kernels: Kernels,
        dtype: torch.dtype,
        group: Group | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`vocab_size`: ids that may be sampled, if the ranks' heads have more rows; None for all."""
        self.spec = spec
        self.group = group
        self._vocab_size = vocab_size
        self.kernels = kernels
        self.dtype = dtype
        self.weights = weights
        self._embedding_scale = torch.tensor(spec.embedding_scale).to(dtype).item()

    def forward(self, token_ids: Tensor, meta: AttentionMetadata, kv: Sequence[Any], rows: Tensor) -> Tensor:
        """Tokens [T] and the KV pool of each layer -> logits float32 [S, V] of `rows` [S]."""
        return self.logits(self.hidden(token_ids, meta, kv, rows))

    def hidden(
        self,
        token_ids: Tensor,
        meta: AttentionMetadata,
        kv: Sequence[Any],
        rows: Tensor,
        adapted: AdapterRows | None = None,
    ) -> Tensor:
        """Tokens [T] and the KV pool of each layer -> what the head reads of `rows`, [S, hidden].

        `adapted` are the rows that have an adapter, None if no row has.
        """
        weights = self.weights
        meta = self.kernels.prepare(meta, self.dtype)
        residual = self._embed(token_ids, meta.positions)
        x = weights.layers[0].attn_norm(residual)
        for i, layer in enumerate(weights.layers):
            x = self._attention(layer, x, meta, kv[i], adapted)
            x = x if layer.attn_post_norm is None else layer.attn_post_norm(x.float())
            residual, x = layer.mlp_norm.add(residual, x)
            x = self._summed(layer.mlp(x, adapted))
            x = x if layer.mlp_post_norm is None else layer.mlp_post_norm(x.float())
            if i + 1 < len(weights.layers):
                residual, x = weights.layers[i + 1].attn_norm.add(residual, x)
        residual, x = residual.index_select(0, rows), x.index_select(0, rows)
        if len(rows):
            _, x = weights.norm.add(residual, x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """What the head reads, [S, hidden] -> logits float32 [S, V]; of several ranks, on the first one."""
        if not len(x):
            return x.new_empty(0, self._vocab_size or self.weights.head.out_features, dtype=torch.float32)
        logits, cap = self._joined(self.weights.head(x)).float(), self.spec.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def exchanges(self, tokens: int, parts: Sequence[int]) -> list[Exchange]:
        """What the ranks exchange in a step of so many tokens, whose head is read by `parts` rows at a time."""
        of_layer = Exchange("sum", (tokens, self.spec.hidden_size), self.dtype)
        embedding = of_layer._replace(dtype=torch.float32)
        columns = self.weights.head.out_features
        heads = [Exchange("gather", (rows, columns), self.dtype) for rows in parts if rows]
        return [embedding, *[of_layer] * (2 * len(self.weights.layers)), *heads]

    def _summed(self, x: Tensor) -> Tensor:
        """All ranks' summands [T, hidden]."""
        return x if self.group is None else self.group.add(x)

    def _joined(self, logits: Tensor) -> Tensor:
        """All ranks' columns, without those behind the vocabulary: [S, V]. Nothing of use but on the first rank."""
        if self.group is None:
            return logits
        columns = self.group.gather(logits)
        return torch.cat(columns, dim=1)[:, : self._vocab_size] if columns else logits

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """[T] -> the residual stream [T, hidden] float32."""
        if self.group is None:
            residual = self.kernels.embed(self.weights.embedding, token_ids)
        else:
            rows = token_ids - self.weights.first_token
            others = (rows < 0) | (rows >= len(self.weights.embedding))
            mine = self.kernels.embed(self.weights.embedding, rows.masked_fill(others, 0))
            residual = self.group.add(mine.masked_fill_(others[:, None], 0))
        if self._embedding_scale != 1:
            residual = residual.mul_(self._embedding_scale)
        if self.weights.positions is not None:
            residual = residual.add_(self.kernels.embed(self.weights.positions, positions))
        return residual

    def _attention(
        self, layer: Layer, x: Tensor, meta: AttentionMetadata, kv: Any, adapted: AdapterRows | None
    ) -> Tensor:
        kernels, spec = self.kernels, self.spec
        qkv = layer.qkv(x, adapted).view(len(x), -1, spec.head_size)
        q = kernels.rotary_kv_write(qkv, layer.cos_sin, meta, kv, layer.q_norm, layer.k_norm, norm_eps=spec.norm_eps)
        attended = kernels.paged_attention(q, kv, meta, layer.attention)
        return self._summed(layer.output(attended.reshape(len(x), -1), adapted))
