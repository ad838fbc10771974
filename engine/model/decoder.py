"""One decoder for all models of `ModelSpec`, over the kernels protocol."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.model.rotary import rotary_table_of
from engine.model.spec import ModelSpec
from engine.model.weights import StoredTensor, Weights
from kernels.protocol import Attention, AttentionMetadata, Kernels, Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer. Norms are float32, matrices packed for the device."""

    attn_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model, ready for its device."""

    embedding: Tensor
    """[V, hidden]"""
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear
    cos_sin: Tensor
    """[most positions, 2, D / 2] float32"""


class Decoder:
    """Turns a step's tokens into logits; holds weights and no state."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, kernels: Kernels, dtype: torch.dtype) -> None:
        self.spec = spec
        self.kernels = kernels
        self.dtype = dtype
        self.weights = weights
        self._variant = Attention(scale=1 / math.sqrt(spec.head_size))

    def forward(self, token_ids: Tensor, meta: AttentionMetadata, kv: Sequence[Any], rows: Tensor) -> Tensor:
        """Tokens [T] and the KV pool of each layer -> logits float32 [S, V] of `rows` [S]."""
        return self.logits(self.hidden(token_ids, meta, kv, rows))

    def hidden(self, token_ids: Tensor, meta: AttentionMetadata, kv: Sequence[Any], rows: Tensor) -> Tensor:
        """Tokens [T] and the KV pool of each layer -> what the head reads of `rows`, [S, hidden]."""
        kernels, spec, weights = self.kernels, self.spec, self.weights
        meta = kernels.prepare(meta, self.dtype)
        residual = kernels.embed(weights.embedding, token_ids)
        x = kernels.rms_norm(residual, weights.layers[0].attn_norm, spec.norm_eps, self.dtype)
        for i, layer in enumerate(weights.layers):
            x = self._attention(layer, x, meta, kv[i])
            residual, x = kernels.add_rms_norm(residual, x, layer.mlp_norm, spec.norm_eps, self.dtype)
            x = layer.down(kernels.silu_and_mul(layer.gate_up(x)))
            if i + 1 < spec.layers:
                norm = weights.layers[i + 1].attn_norm
                residual, x = kernels.add_rms_norm(residual, x, norm, spec.norm_eps, self.dtype)
        residual, x = residual.index_select(0, rows), x.index_select(0, rows)
        if len(rows):
            _, x = kernels.add_rms_norm(residual, x, weights.norm, spec.norm_eps, self.dtype)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """What the head reads, [S, hidden] -> logits float32 [S, V]."""
        if not len(x):
            return x.new_empty(0, self.weights.head.out_features, dtype=torch.float32)
        return self.weights.head(x).float()

    def _attention(self, layer: Layer, x: Tensor, meta: AttentionMetadata, kv: Any) -> Tensor:
        kernels, spec = self.kernels, self.spec
        qkv = layer.qkv(x).view(len(x), -1, spec.head_size)
        q = kernels.rotary_kv_write(
            qkv, self.weights.cos_sin, meta, kv, layer.q_norm, layer.k_norm, norm_eps=spec.norm_eps
        )
        attended = kernels.paged_attention(q, kv, meta, self._variant)
        return layer.output(attended.view(len(x), -1))


def build_weights(
    spec: ModelSpec,
    source: Weights,
    kernels: Kernels,
    *,
    dtype: torch.dtype,
    device: torch.device,
    vocab_size: int,
    positions: int,
) -> DecoderWeights:
    """Read, fuse and pack all weights. The head is cut to `vocab_size` rows: padding ids are never sampled."""
    loader = _Loader(source, kernels, dtype, device)
    embedding = loader.matrix("embedding")
    head = embedding if spec.tied_head else loader.matrix("head")
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_layer(spec, loader, i) for i in range(spec.layers)),
        norm=loader.norm("norm"),
        head=kernels.linear(head[:vocab_size]),
        cos_sin=torch.from_numpy(rotary_table_of(spec, source, positions)).to(device),
    )


def _layer(spec: ModelSpec, loader: _Loader, i: int) -> Layer:
    return Layer(
        attn_norm=loader.norm(f"{i}.attn_norm"),
        qkv=loader.linear([f"{i}.q", f"{i}.k", f"{i}.v"], bias=spec.qkv_bias),
        output=loader.linear([f"{i}.o"], bias=spec.output_bias),
        mlp_norm=loader.norm(f"{i}.mlp_norm"),
        gate_up=loader.linear([f"{i}.gate", f"{i}.up"], bias=spec.mlp_bias),
        down=loader.linear([f"{i}.down"], bias=spec.mlp_bias),
        q_norm=loader.norm(f"{i}.q_norm") if spec.qk_norm else None,
        k_norm=loader.norm(f"{i}.k_norm") if spec.qk_norm else None,
    )


@dataclass(frozen=True, slots=True)
class _Loader:
    source: Weights
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device

    def norm(self, name: str) -> Tensor:
        return torch.from_numpy(self.source[name].float32()).to(self.device)

    def matrix(self, name: str) -> Tensor:
        return to_torch(self.source[name]).to(self.device, self.dtype)

    def linear(self, names: Sequence[str], *, bias: bool) -> Linear:
        """Matrices of the same input as one."""
        weight = torch.cat([self.matrix(name) for name in names])
        return self.kernels.linear(weight, torch.cat([self.matrix(f"{n}.bias") for n in names]) if bias else None)


def to_torch(stored: StoredTensor) -> Tensor:
    """Elements in the file's own type, blocks as float32."""
    if stored.kind == "BF16":
        return torch.from_numpy(stored.data.view(np.int16).copy()).view(torch.bfloat16)
    if stored.kind == "F16":
        return torch.from_numpy(stored.data.copy())
    return torch.from_numpy(stored.float32())
