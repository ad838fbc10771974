"""The operations in plain torch: what every other implementation is tested against, and what runs without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from kernels.adapters import AdapterRows, Adapters
from kernels.columns import Columns
from kernels.kv import KVLayout, Thinning
from kernels.protocol import Attention, AttentionMetadata, Linear
from kernels.reference_attention import AttentionPlan, PagedKV, attend, kv_views, plan, thin
from kernels.reference_sampling import choose, sample
from kernels.sampling import Sampled, SamplingBatch
from kernels.weights import QuantisedWeight

PACKED_FOR_ROWS = 64
"""Rows that the packed layout of a weight is chosen for; any number of rows may be multiplied with it."""
RESTORED_NUMBERS = 2**22
"""Of a quantised weight that are there as floats at once."""


class TorchLinear:
    """A weight as it came."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """A weight in the blocked layout of oneDNN, which saves reordering it at every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


class RestoredLinear:
    """A quantised weight, some outputs of which are restored at a time and multiplied with."""

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self._weight = weight
        self._bias = bias
        self._outputs = max(1, RESTORED_NUMBERS // weight.in_features)

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), self.out_features)
        for first in range(0, self.out_features, self._outputs):
            mine = slice(first, first + self._outputs)
            bias = None if self._bias is None else self._bias[mine]
            out[:, mine] = functional.linear(x, self._weight.restored(x.dtype, mine), bias)
        return out


class ReferenceKernels:
    """The torch implementation of `kernels.protocol.Kernels`, on any device."""

    name = "reference"
    stays_on_device = False

    def __init__(self, device: torch.device, kv_dtype: torch.dtype | None = None) -> None:
        """Keys and values are quantised to `kv_dtype`; None keeps them in the model's own type."""
        self.kv_dtype = kv_dtype
        self._packs = device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if self._packs and _onednn_has(weight.dtype):
            return PackedLinear(weight.contiguous(), bias)
        return TorchLinear(weight.contiguous(), bias)

    def quantised_linear(self, weight: QuantisedWeight, bias: Tensor | None = None) -> Linear:
        return RestoredLinear(weight, bias)

    def add_adapters(self, x: Tensor, out: Tensor, rows: AdapterRows, adapters: Adapters) -> None:
        add_adapters(x, out, rows, adapters)

    def kv_views(self, storage: Tensor, layout: KVLayout, dtype: torch.dtype) -> list[PagedKV]:
        return kv_views(storage, layout, dtype, self.kv_dtype)

    def prepare(self, meta: AttentionMetadata, dtype: torch.dtype) -> AttentionMetadata:
        return replace(meta, plan=plan(meta, dtype))

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        return table.index_select(0, token_ids).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps).to(out_dtype)

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        residual = residual.add_(x)
        return residual, self.rms_norm(residual, weight, eps, out_dtype)

    def rotary_kv_write(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        meta: AttentionMetadata,
        kv: PagedKV,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> Tensor:
        kv_heads, head_size = kv.kv_heads, qkv.shape[2]
        heads = qkv.shape[1] - 2 * kv_heads
        qk, v = qkv[:, : heads + kv_heads].float(), qkv[:, heads + kv_heads :]
        if q_norm is not None and k_norm is not None:
            weight = torch.cat([q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)])
            qk = functional.rms_norm(qk, (head_size,), None, norm_eps).mul_(weight)
        cos, sin = cos_sin.index_select(0, meta.positions)[:, :, None].unbind(1)
        half = cos_sin.shape[2]
        first, second, still = qk.tensor_split([half, 2 * half], dim=-1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin, still], dim=-1)
        attention: AttentionPlan = meta.plan
        kv.write(attention.rows, rotated[:, heads:], v)
        return rotated[:, :heads].to(qkv.dtype)

    def paged_attention(self, q: Tensor, kv: PagedKV, meta: AttentionMetadata, attention: Attention) -> Tensor:
        return attend(q, kv, meta, attention)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        return gelu_and_mul(gate_up)

    def copy_pages(self, storage: Tensor, layout: KVLayout, source: Tensor, target: Tensor) -> None:
        pages = page_view(storage, layout)
        per_extent = layout.pages_per_extent
        pages[target // per_extent, target % per_extent] = pages[source // per_extent, source % per_extent]

    def thin(self, kv: Sequence[PagedKV], layout: KVLayout, work: Thinning) -> None:
        thin(kv, layout, work)

    def choose(self, logits: Tensor, columns: Columns) -> Tensor:
        return choose(logits, columns)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        return sample(logits, batch)


def add_adapters(x: Tensor, out: Tensor, rows: AdapterRows, adapters: Adapters) -> None:
    """Add to out [T, out] what each row's adapter makes of x [T, in]."""
    for adapter, (begin, end) in enumerate(pairwise(rows.starts.tolist())):
        if begin == end:
            continue
        mine = rows.order[begin:end].long()
        low = functional.linear(x[mine], adapters.shrink[adapter].flatten(0, 1)).chunk(len(adapters.widths), -1)
        sums = out[mine]
        for part, place in enumerate(pairwise(adapters.bounds.tolist())):
            columns = slice(*place)
            sums[:, columns] = torch.addmm(sums[:, columns], low[part], adapters.expand[adapter, columns].T)
        out.index_copy_(0, mine, sums)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * inner] -> gelu(first half, by its tanh form) * second half, [T, inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def _onednn_has(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of `dtype` with this CPU's own instructions."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def page_view(storage: Tensor, layout: KVLayout) -> Tensor:
    """The pages of `storage` [bytes] uint8: [extents, pages of an extent, bytes]."""
    shape = (len(storage) // layout.extent_bytes, layout.pages_per_extent, layout.page_bytes)
    return storage.as_strided(shape, (layout.extent_bytes, layout.page_bytes, 1))
