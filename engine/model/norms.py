"""The two kinds of norm, each with the sum that comes before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from kernels.protocol import Kernels


class Norm(Protocol):
    """Makes a layer's input of the residual stream."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] float32 -> [T, hidden] of the model's dtype."""
        ...

    def add(self, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Add x [T, hidden] to the residual, which is given up; the new residual and its norm."""
        ...


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """By the root of the mean square."""

    kernels: Kernels
    weight: Tensor
    """[hidden] float32"""
    eps: float
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps, self.dtype)

    def add(self, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.add_rms_norm(residual, x, self.weight, self.eps, self.dtype)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """By the deviation from the mean; in plain torch."""

    weight: Tensor
    """[hidden] float32"""
    bias: Tensor
    """[hidden] float32"""
    eps: float
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps).to(self.dtype)

    def add(self, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual.add_(x)
        return residual, self(residual)
