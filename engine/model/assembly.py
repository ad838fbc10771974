"""A decoder's parts from a model's files: read, joined, converted and packed for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import Quantization
from engine.model.adapter import Adapter
from engine.model.adapter_weights import build_adapters
from engine.model.decoder import DecoderWeights, Layer
from engine.model.mlp import MLP, Experts, GatedMLP, PlainMLP, gated, plain
from engine.model.norms import LayerNorm, Norm, RMSNorm
from engine.model.ops import Operation
from engine.model.projection import Projection
from engine.model.quantised import quantised
from engine.model.rotary import rotary_table_of
from engine.model.spec import ModelSpec
from engine.model.split import Part, tokens_of_each
from engine.model.tensors import to_torch
from engine.model.weights import Weights
from kernels.protocol import Attention, Kernels, Linear


def build_weights(
    spec: ModelSpec,
    source: Weights,
    kernels: Kernels,
    *,
    dtype: torch.dtype,
    device: torch.device,
    vocab_size: int,
    positions: int,
    ops: Mapping[str, Operation] | None = None,
    part: Part | None = None,
    adapters: Sequence[Adapter] = (),
    quantization: Quantization = "none",
) -> DecoderWeights:
    """Read, fuse and pack all weights. The head is cut to `vocab_size` rows: padding ids are never sampled.

    `ops` stand in the place of built-in operations. `part`: `spec` and `source` are those of one of several ranks,
    whose head keeps its rows, so that all have as many. `quantization` is of the layers' matrices; embedding, head
    and routers stay in `dtype`.
    """
    parts = _Parts(spec, source, kernels, dtype, device, ops or {}, adapters, quantization)
    rows = vocab_size if part is None else tokens_of_each(spec.vocab_rows, part.ranks)
    embedding = parts.matrix("embedding", rows if part else 0)
    head = embedding if spec.tied_head else parts.matrix("head", rows if part else 0)
    tables = {
        rope: torch.from_numpy(rotary_table_of(spec, source, positions, rope)).to(device)
        for rope in {spec.rope_of(layer) for layer in range(spec.layers)}
    }
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(parts.layer(i, tables[spec.rope_of(i)]) for i in range(spec.layers)),
        norm=parts.norm("norm"),
        head=kernels.linear(head[:rows]),
        positions=parts.matrix("positions")[:positions] if spec.rope is None else None,
        first_token=part.tokens(spec.vocab_rows).start if part else 0,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    spec: ModelSpec
    source: Weights
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    ops: Mapping[str, Operation]
    adapters: Sequence[Adapter]
    quantization: Quantization

    def layer(self, i: int, cos_sin: Tensor) -> Layer:
        spec = self.spec
        post_norms = [self.norm(f"{i}.{part}_post_norm") if spec.post_norms else None for part in ("attn", "mlp")]
        return Layer(
            attn_norm=self.norm(f"{i}.attn_norm"),
            qkv=self.projection([f"{i}.q", f"{i}.k", f"{i}.v"], bias=spec.qkv_bias),
            attention=Attention(spec.scale, spec.window(i), spec.score_cap),
            cos_sin=cos_sin,
            output=self.projection([f"{i}.o"], bias=spec.output_bias),
            mlp_norm=self.norm(f"{i}.mlp_norm"),
            mlp=self.experts(i) if spec.has_experts(i) else self.mlp(f"{i}"),
            q_norm=self.norm_weight(f"{i}.q_norm") if spec.qk_norm else None,
            k_norm=self.norm_weight(f"{i}.k_norm") if spec.qk_norm else None,
            attn_post_norm=post_norms[0],
            mlp_post_norm=post_norms[1],
        )

    def mlp(self, prefix: str) -> MLP:
        spec, bias = self.spec, self.spec.mlp_bias
        down = self.projection([f"{prefix}.down"], bias=bias)
        if not spec.gated:
            return PlainMLP(plain(spec.activation, self.ops), self.projection([f"{prefix}.up"], bias=bias), down)
        gate_up = self.projection([f"{prefix}.gate", f"{prefix}.up"], bias=bias)
        return GatedMLP(gated(spec.activation, self.kernels, self.ops), gate_up, down)

    def experts(self, i: int) -> Experts:
        experts = self.spec.experts
        assert experts is not None
        return Experts(
            router=self.linear([f"{i}.router"], bias=False),
            experts=tuple(self.mlp(f"{i}.experts.{number}") for number in range(experts.count)),
            chosen=experts.chosen,
            normalised=experts.normalised,
        )

    def norm(self, name: str) -> Norm:
        spec, weight = self.spec, self.norm_weight(name)
        if spec.norm == "rms":
            return RMSNorm(self.kernels, weight, spec.norm_eps, self.dtype)
        bias = torch.from_numpy(self.source[f"{name}.bias"].float32()).to(self.device)
        return LayerNorm(weight, bias, spec.norm_eps, self.dtype)

    def norm_weight(self, name: str) -> Tensor:
        weight = torch.from_numpy(self.source[name].float32()).to(self.device)
        return weight + 1 if self.spec.norm_from_one else weight

    def matrix(self, name: str, least_rows: int = 0) -> Tensor:
        """With rows of zeros behind its own if those are fewer."""
        found = to_torch(self.source[name]).to(self.device, self.dtype)
        missing = least_rows - len(found)
        return found if missing <= 0 else torch.cat([found, found.new_zeros(missing, *found.shape[1:])])

    def projection(self, names: Sequence[str], *, bias: bool) -> Projection:
        """Matrices of the same input as one, with what the adapters add to them."""
        widths = [self.source.shape(name)[0] for name in names]
        adapters = build_adapters(self.adapters, names, widths, self.dtype, self.device)
        return Projection(self.kernels, self.product(names, bias=bias), adapters)

    def product(self, names: Sequence[str], *, bias: bool) -> Linear:
        """The same in the form that is asked for."""
        if self.quantization != "none":
            weight = quantised([self.source[name] for name in names], self.quantization, self.device)
            if weight is not None:
                return self.kernels.quantised_linear(weight, self.bias(names) if bias else None)
        return self.linear(names, bias=bias)

    def linear(self, names: Sequence[str], *, bias: bool) -> Linear:
        """Matrices of the same input as one."""
        weight = torch.cat([self.matrix(name) for name in names])
        return self.kernels.linear(weight, self.bias(names) if bias else None)

    def bias(self, names: Sequence[str]) -> Tensor:
        return torch.cat([self.matrix(f"{name}.bias") for name in names])
