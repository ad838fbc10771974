"""A layer's matrices in 8 or 4 bits: rounded as they are read, or as the blocks of a GGUF file have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import gguf
import torch
from torch import Tensor

from engine.config import Quantization
from engine.model.spec import ModelSpec, UnsupportedModel
from engine.model.split import Part
from engine.model.tensors import to_torch
from engine.model.weights import StoredTensor
from kernels.weights import GROUP, RUN, Bits, QuantisedWeight, pack_int4

ROUNDED: Mapping[Quantization, Bits] = {"int8": 8, "int4": 4}
"""The forms that any weight can be brought into."""
BLOCK = 32
"""Inputs of a GGUF block, or of a part of one, that share a scale."""


def quantised(
    parts: Sequence[StoredTensor], quantization: Quantization, device: torch.device
) -> QuantisedWeight | None:
    """Matrices of the same inputs as one, in a form other than `none`; None if they are to stay as they are.

    Of blocks, all take the widest form that one of them needs: 4 bits, 8 bits, or none if one isn't in blocks at all.
    """
    if quantization != "gguf":
        bits = ROUNDED[quantization]
        return QuantisedWeight.joined([QuantisedWeight.rounded(to_torch(part).to(device), bits) for part in parts])
    if any(part.is_plain or part.shape[1] % RUN for part in parts):
        return None
    four = all(part.kind in _FOUR_BITS for part in parts)
    return QuantisedWeight.joined([_four_bits(part, device) if four else _eight_bits(part, device) for part in parts])


def check_groups(spec: ModelSpec, quantization: Quantization, ranks: int = 1) -> None:
    """Raise UnsupportedModel if a matrix of the model, divided among so many ranks, has inputs that fit no groups."""
    if quantization not in ROUNDED:
        return
    own = Part(0, ranks).spec(spec)
    widths = {"hidden size": own.hidden_size, "width of all heads": own.heads * own.head_size}
    if not all(map(own.has_experts, range(own.layers))):
        widths["MLPs' width"] = own.inner_size
    if own.experts is not None:
        widths["experts' width"] = own.experts.inner_size
    odd = next((f"{name} is {width}" for name, width in widths.items() if width % GROUP), None)
    if odd is not None:
        of = "the model's" if ranks == 1 else f"on each of {ranks} devices the model's"
        raise UnsupportedModel(
            f"quantization={quantization!r} takes inputs in groups of {GROUP}, and {of} {odd}: set quantization to none"
            + (", or divide the model among fewer devices" if ranks > 1 else "")
        )


def _eight_bits(stored: StoredTensor, device: torch.device) -> QuantisedWeight:
    """Q8_0 as it is; any other type is rounded, in groups as small."""
    if stored.kind != "Q8_0":
        return QuantisedWeight.rounded(to_torch(stored).to(device), 8, BLOCK)
    raw = _blocks(stored, device)
    return QuantisedWeight(8, raw[..., 2:].contiguous().view(torch.int8).flatten(1), _half(raw, 0))


def _four_bits(stored: StoredTensor, device: torch.device) -> QuantisedWeight:
    return _FOUR_BITS[stored.kind](_blocks(stored, device))


def _q4_0(raw: Tensor) -> QuantisedWeight:
    return QuantisedWeight(4, _repacked(raw[..., 2:]), _half(raw, 0))


def _q4_1(raw: Tensor) -> QuantisedWeight:
    return QuantisedWeight(4, _repacked(raw[..., 4:]), _half(raw, 0), _half(raw, 2))


def _q4_k(raw: Tensor) -> QuantisedWeight:
    """Its bytes lie as ours do; scales and minimums of 8 groups are in 6 bits each, under two of the block's own."""
    packed = raw[..., 4:16].reshape(-1, 12).cpu().numpy()
    own, under = (torch.from_numpy(part).to(raw.device) for part in gguf.quants.Q4_K.get_scale_min(packed))
    scales, minimums = (
        (_half(raw, at).float()[..., None] * of_groups.view(*raw.shape[:2], -1)).flatten(1)
        for at, of_groups in ((0, own), (2, under))
    )
    return QuantisedWeight(4, raw[..., 16:].flatten(1), scales, -minimums)


_FOUR_BITS: Mapping[str, Callable[[Tensor], QuantisedWeight]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}


def _blocks(stored: StoredTensor, device: torch.device) -> Tensor:
    """uint8 [rows, blocks of a row, bytes of a block]"""
    _, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[stored.kind]]
    return torch.from_numpy(stored.data.copy()).to(device).view(stored.shape[0], -1, size_bytes)


def _half(raw: Tensor, at: int) -> Tensor:
    """The float16 at some byte of each block: [rows, blocks]."""
    return raw[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _repacked(packed: Tensor) -> Tensor:
    """Bytes [rows, blocks, 16], of which the low halves are a block's first 16 numbers, as `pack_int4` has them."""
    return pack_int4(torch.cat([packed & 15, packed >> 4], dim=-1).flatten(1))
