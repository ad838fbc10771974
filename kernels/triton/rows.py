"""Norms, gated activations, rotation with the KV write, and page copies: how their kernels are launched."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.kv import KVLayout
from kernels.protocol import AttentionMetadata
from kernels.quantised import GREATEST
from kernels.triton import configs
from kernels.triton.device.copy import copy_kernel
from kernels.triton.device.rotary import rotary_kernel
from kernels.triton.device.rows import gated_kernel, rms_norm_kernel
from kernels.triton.kv import LayerKV, Places, page_offsets, unit_of

WORD_BYTES = 4


def rms_norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """[T, hidden] -> its norm; with a residual [T, hidden] float32, x is added to it in place first."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=out_dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(columns)
        rms_norm_kernel[(rows,)](
            x, x if residual is None else residual, weight, out, eps, columns, BLOCK=block, ADD=residual is not None,
            num_warps=configs.warps_of_row(block), num_stages=1,
        )  # fmt: skip
    return out


def gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    """[T, 2 * inner] -> activation(first half) * second half, [T, inner]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(configs.GATED_BLOCK, triton.next_power_of_2(inner))
        gated_kernel[rows, triton.cdiv(inner, block)](
            gate_up, out, inner, GELU=gelu, BLOCK=block, num_warps=4, num_stages=1
        )
    return out


def rotary_kv_write(
    qkv: Tensor,
    cos_sin: Tensor,
    meta: AttentionMetadata,
    kv: LayerKV,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
) -> Tensor:
    """As `kernels.protocol.Kernels.rotary_kv_write`; quantised where the pages are."""
    tokens, total, size = qkv.shape
    layout, places = kv.layout, meta.plan
    assert isinstance(places, Places)
    heads, half = total - 2 * layout.kv_heads, cos_sin.shape[2]
    q = torch.empty(tokens, heads, size, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    norm = q_norm is not None and k_norm is not None
    rotary_kernel[(triton.cdiv(tokens * total, configs.ROTARY_HEADS),)](
        qkv, cos_sin, meta.positions, q_norm if norm else qkv, k_norm if norm else qkv, norm_eps, q, kv.keys, kv.values,
        kv.key_scales, kv.value_scales, places.pages_of_tokens, places.lines, tokens,
        HEADS=heads, KV_HEADS=layout.kv_heads, D=size, HALF=half, BLOCK_HALF=triton.next_power_of_2(max(1, half)),
        BLOCK_REST=triton.next_power_of_2(size - 2 * half) if size > 2 * half else 0, PAGE=layout.page_size,
        BLOCK=configs.ROTARY_HEADS, UNIT=kv.unit, NORM=norm, SCALED=kv.is_scaled, ROUND=kv.keys.dtype == torch.int8,
        GREATEST=GREATEST.get(kv.keys.dtype, 1.0), num_warps=4, num_stages=1,
    )  # fmt: skip
    return q


def copy_pages(storage: Tensor, layout: KVLayout, source: Tensor, target: Tensor) -> None:
    """Copy pages `source` [n] onto pages `target` [n]; no target is a source as well."""
    if layout.page_bytes % WORD_BYTES:
        raise ValueError(f"pages of {layout.page_bytes} bytes can't be copied by words of {WORD_BYTES}")
    if not len(source):
        return
    words = layout.page_bytes // WORD_BYTES
    unit = unit_of(words)
    copy_kernel[len(source), triton.cdiv(words, configs.COPY_BLOCK)](
        storage.view(torch.int32), page_offsets(source, layout, unit * WORD_BYTES),
        page_offsets(target, layout, unit * WORD_BYTES), words, UNIT=unit, BLOCK=configs.COPY_BLOCK,
        num_warps=4, num_stages=1,
    )  # fmt: skip
