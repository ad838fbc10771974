"""Keys and values in one byte for each number: those of a token's head share a float32 scale."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.kv import KVLayout

GREATEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The greatest number of each type that needs scales."""
SCALE_BYTES = 4
"""Of one token's key or value in one head."""
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""By the names that settings have for them."""


def scale_bytes(dtype: torch.dtype) -> int:
    """What stands beside each head of a key or a value of this type."""
    return SCALE_BYTES if dtype in GREATEST else 0


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[..., D] -> numbers [..., D] of `dtype`, and the float32 scale of each head [...]."""
    x = x.float()
    scales = x.abs().amax(-1) / GREATEST[dtype]
    scaled = x / torch.where(scales > 0, scales, 1.0)[..., None]
    return (scaled + 0.5).floor_().to(dtype) if dtype == torch.int8 else scaled.to(dtype), scales


def restore(numbers: Tensor, scales: Tensor) -> Tensor:
    """Numbers [..., D] times the scales of their heads [...], float32."""
    return numbers.float() * scales[..., None]


def check_layout(layout: KVLayout, dtype: torch.dtype) -> None:
    """Raise ValueError if pages of `layout` don't hold keys and values of this type."""
    if (layout.element_bytes, layout.scale_bytes) != (dtype.itemsize, scale_bytes(dtype)):
        raise ValueError(
            f"a KV of {dtype} has {dtype.itemsize} bytes for each element and {scale_bytes(dtype)} for each scale,"
            f" the KV layout {layout.element_bytes} and {layout.scale_bytes}"
        )
