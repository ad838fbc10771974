"""A layer's product with a weight, and what its rows' adapters add to it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.adapters import AdapterRows, Adapters
from kernels.protocol import Kernels, Linear


@dataclass(frozen=True, slots=True)
class Projection:
    """A packed weight and the adapters that there are of it."""

    kernels: Kernels
    linear: Linear
    adapters: Adapters | None = None

    def __call__(self, x: Tensor, adapted: AdapterRows | None = None) -> Tensor:
        """[T, in] -> [T, out], of the model's dtype; `adapted` are the rows of x that have an adapter, if any have."""
        out = self.linear(x)
        if adapted is not None and self.adapters is not None:
            self.kernels.add_adapters(x, out, adapted, self.adapters)
        return out
