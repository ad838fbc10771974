"""The CPU library's operations as `kernels.protocol.Kernels`, over torch tensors that are read in place.

The engine runs whole steps in the library (`kernels.cpu.step`); this is for using and testing operations one by
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.adapters import AdapterRows, Adapters
from kernels.columns import Columns
from kernels.cpu import copy, ops
from kernels.cpu.adapters import add_adapters as add_packed
from kernels.cpu.adapters import pack_adapters
from kernels.cpu.layers import NUMBERS, Heads, Numbers, Step
from kernels.cpu.library import Team
from kernels.cpu.linear import Then, linear
from kernels.cpu.packing import Format, Matrix, Packed, Source, pack
from kernels.cpu.sampling import Sampler
from kernels.cpu.thinning import thin
from kernels.kv import KVLayout, Thinning
from kernels.protocol import Attention, AttentionMetadata, Linear
from kernels.quantised import TYPES, check_layout
from kernels.reference import RestoredLinear, TorchLinear, add_adapters, gelu_and_mul
from kernels.reference_sampling import choose
from kernels.sampling import Sampled, SamplingBatch
from kernels.weights import QuantisedWeight

DTYPES: dict[torch.dtype, type[np.generic]] = {torch.float32: np.float32, torch.bfloat16: np.uint16}
"""What activations, keys and values may be, and how numpy holds it."""
NUMBERS_OF = {TYPES.get(name): numbers for name, numbers in NUMBERS.items()}
"""By what keys and values are quantised to; None if they aren't."""


@dataclass(frozen=True)
class LayerKV:
    """One layer's keys and values of all pages: the arena, and where the layer's block begins in a page."""

    arena: NDArray[np.uint8]
    offset_bytes: int
    layout: KVLayout
    is_float: bool
    numbers: Numbers

    def heads(self, heads: int) -> Heads:
        layout = self.layout
        return Heads(heads, layout.kv_heads, layout.head_size, layout.page_size, self.is_float, numbers=self.numbers)


class PackedLinear:
    """A weight in the library's tiles."""

    def __init__(self, team: Team, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._team = team
        self._dtype = weight.dtype
        self._is_float = _type(weight) is np.float32
        # Products of bf16 run over pairs of inputs.
        self._odd = not self._is_float and self.in_features % 2 == 1
        padded = torch.nn.functional.pad(weight, (0, 1)) if self._odd else weight
        form, source = (Format.F32, Source.F32) if self._is_float else (Format.BF16, Source.BF16)
        self._packed: Packed = pack(team, form, [Matrix(source, to_numpy(padded), padded.shape[1])])
        self._bias = None if bias is None else to_numpy(bias.float())

    def __call__(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x, (0, 1)) if self._odd else x
        then = Then.STORE_FLOAT if self._is_float else Then.STORE_BF16
        return to_torch(linear(self._team, self._packed, to_numpy(x), then, bias=self._bias))


class CpuKernels:
    """`kernels.protocol.Kernels` on a team of threads."""

    name = "cpu"
    stays_on_device = False

    def __init__(self, team: Team, kv_dtype: torch.dtype | None = None) -> None:
        """Keys and values are quantised to `kv_dtype`; None keeps them in the model's own type."""
        self.team = team
        self.kv_dtype = kv_dtype
        self._samplers: dict[int, Sampler] = {}

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return PackedLinear(self.team, weight, bias) if weight.dtype in DTYPES else TorchLinear(weight, bias)

    def quantised_linear(self, weight: QuantisedWeight, bias: Tensor | None = None) -> Linear:
        return RestoredLinear(weight, bias)  # the library's own 8 and 4 bits take activations in 8 bits, too

    def add_adapters(self, x: Tensor, out: Tensor, rows: AdapterRows, adapters: Adapters) -> None:
        if x.dtype not in DTYPES:
            add_adapters(x, out, rows, adapters)
            return
        of_row = torch.zeros(len(x), dtype=torch.int32)
        for number, (begin, end) in enumerate(pairwise(rows.starts.tolist()), start=1):
            of_row[rows.order[begin:end].long()] = number
        shrink, expand = adapters.shrink.float().numpy(), adapters.expand.float().numpy()
        is_float = x.dtype == torch.float32
        packed = pack_adapters(self.team.library, shrink, expand, adapters.widths, is_float=is_float)
        sums = to_numpy(out)  # its own memory, unless it isn't contiguous
        add_packed(self.team, packed, of_row.numpy(), to_numpy(x), sums)
        out.copy_(to_torch(sums))

    def kv_views(self, storage: Tensor, layout: KVLayout, dtype: torch.dtype) -> list[LayerKV]:
        is_float = _type(torch.empty(0, dtype=dtype)) is np.float32
        check_layout(layout, self.kv_dtype or dtype)
        arena = storage.numpy()
        numbers = NUMBERS_OF[self.kv_dtype]
        offsets = range(0, layout.page_bytes, layout.layer_bytes)
        views = [LayerKV(arena, offset, layout, is_float, numbers) for offset in offsets]
        views[0].heads(layout.kv_heads)  # refuses what the library can't serve
        return views

    def prepare(self, meta: AttentionMetadata, dtype: torch.dtype) -> AttentionMetadata:
        layout = meta.layout
        extents, index = np.divmod(meta.block_table.numpy().astype(np.int64), layout.pages_per_extent)
        step = Step(
            positions=meta.positions.numpy(),
            query_start=meta.query_start.numpy(),
            context_len=meta.context_len.numpy(),
            page_offset=extents * layout.extent_bytes + index * layout.page_bytes,
        )
        return replace(meta, plan=step)

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        return to_torch(ops.embed(self.team, to_numpy(table), token_ids.numpy()))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        return to_torch(ops.rms_norm(self.team, to_numpy(x), to_numpy(weight.float()), eps, DTYPES[out_dtype]))

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ops.add_rows(self.team, residual.numpy(), to_numpy(x))
        return residual, self.rms_norm(residual, weight, eps, out_dtype)

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
        heads = kv.heads(qkv.shape[1] - 2 * kv.layout.kv_heads)
        q_weight, k_weight = (None if norm is None else to_numpy(norm.float()) for norm in (q_norm, k_norm))
        return to_torch(
            ops.rotary_kv_write(
                self.team,
                meta.plan,
                heads,
                to_numpy(qkv),
                to_numpy(cos_sin),
                kv.arena,
                kv.offset_bytes,
                q_norm=q_weight,
                k_norm=k_weight,
                norm_eps=norm_eps,
            )
        )

    def paged_attention(self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, attention: Attention) -> Tensor:
        if attention.soft_cap is not None or attention.sinks is not None:
            raise NotImplementedError("the CPU library's attention has neither soft caps nor sinks")
        heads = replace(kv.heads(q.shape[1]), window_tokens=attention.window)
        return to_torch(
            ops.paged_attention(self.team, meta.plan, heads, to_numpy(q), kv.arena, attention.scale, kv.offset_bytes)
        )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return to_torch(ops.silu_and_mul(self.team, to_numpy(gate_up)))

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        return gelu_and_mul(gate_up)  # torch's: the library has none

    def copy_pages(self, storage: Tensor, layout: KVLayout, source: Tensor, target: Tensor) -> None:
        offsets = ([layout.offset_bytes(page) for page in pages.tolist()] for pages in (source, target))
        copy.copy_pages(self.team, storage.numpy(), layout.page_bytes, *offsets)

    def thin(self, kv: Sequence[LayerKV], layout: KVLayout, work: Thinning) -> None:
        heads = kv[0].heads(layout.kv_heads)
        thin(self.team, heads, layout, kv[0].arena, work)

    def choose(self, logits: Tensor, columns: Columns) -> Tensor:
        return choose(logits, columns)  # torch's: the library takes its parameters from the host

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        vocab = logits.shape[1]
        if vocab not in self._samplers:
            self._samplers[vocab] = Sampler(self.team, vocab)
        return self._samplers[vocab].sample(to_numpy(logits), batch)


def _type(tensor: Tensor) -> type[np.generic]:
    if tensor.dtype not in DTYPES:
        raise TypeError(f"the CPU library computes in float32 and bfloat16, not in {tensor.dtype}")
    return DTYPES[tensor.dtype]


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """The tensor's memory, bfloat16 as uint16; a copy only if it isn't contiguous."""
    if _type(tensor) is np.uint16:
        tensor = tensor.view(torch.uint16) if tensor.is_contiguous() else tensor.contiguous().view(torch.uint16)
    array: NDArray[Any] = tensor.detach().contiguous().numpy()
    return array


def to_torch(array: NDArray[Any]) -> Tensor:
    """The array's memory, uint16 as bfloat16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
