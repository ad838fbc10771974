"""The Triton kernels as `kernels.protocol.Kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.adapters import AdapterRows, Adapters
from kernels.columns import Columns
from kernels.kv import KVLayout, Thinning
from kernels.protocol import Attention, AttentionMetadata, Linear
from kernels.reference import TorchLinear
from kernels.sampling import Sampled, SamplingBatch
from kernels.triton import attention, lora, rows, sampling
from kernels.triton.configs import Architecture
from kernels.triton.kv import LayerKV, kv_views, places
from kernels.triton.linear import QuantisedLinear
from kernels.triton.thinning import thin
from kernels.weights import QuantisedWeight


class TritonKernels:
    """Serves one GPU. Dense products go to the vendor's library, everything else is Triton."""

    name = "triton"
    stays_on_device = True

    def __init__(self, architecture: Architecture, kv_dtype: torch.dtype | None = None) -> None:
        """Keys and values are kept in `kv_dtype`; None keeps them in the model's own type."""
        self.architecture = architecture
        self.kv_dtype = kv_dtype

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return TorchLinear(weight.contiguous(), bias)

    def quantised_linear(self, weight: QuantisedWeight, bias: Tensor | None = None) -> Linear:
        return QuantisedLinear(self.architecture, weight, bias)

    def add_adapters(self, x: Tensor, out: Tensor, rows: AdapterRows, adapters: Adapters) -> None:
        lora.add_adapters(x, out, rows, adapters, self.architecture)

    def kv_views(self, storage: Tensor, layout: KVLayout, dtype: torch.dtype) -> list[LayerKV]:
        return kv_views(storage, layout, self.kv_dtype or dtype)

    def prepare(self, meta: AttentionMetadata, dtype: torch.dtype) -> AttentionMetadata:
        return replace(meta, plan=places(meta))

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        return table.index_select(0, token_ids).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        return rows.rms_norm(x, weight, eps, out_dtype)

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return residual, rows.rms_norm(x, weight, eps, out_dtype, residual)

    def rotary_kv_write(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        meta: AttentionMetadata,
        kv: LayerKV,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> Tensor:
        return rows.rotary_kv_write(qkv, cos_sin, meta, kv, q_norm, k_norm, norm_eps)

    def paged_attention(self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, variant: Attention) -> Tensor:
        return attention.paged_attention(q, kv, meta, variant, self.architecture)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return rows.gated(gate_up, gelu=False)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        return rows.gated(gate_up, gelu=True)

    def copy_pages(self, storage: Tensor, layout: KVLayout, source: Tensor, target: Tensor) -> None:
        rows.copy_pages(storage, layout, source, target)

    def thin(self, kv: Sequence[LayerKV], layout: KVLayout, work: Thinning) -> None:
        thin(kv, layout, work)

    def choose(self, logits: Tensor, columns: Columns) -> Tensor:
        return sampling.choose_by(logits, columns)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        return sampling.sample(logits, batch)
