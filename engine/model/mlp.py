"""What stands between two attentions: a gated MLP, a plain one, or a choice of many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.model.ops import Operation, gated_by, plain_by
from engine.model.projection import Projection
from engine.model.spec import Activation
from kernels.adapters import AdapterRows
from kernels.protocol import Kernels, Linear

Activate = Callable[[Tensor], Tensor]


class MLP(Protocol):
    """A layer's own work on each token."""

    def __call__(self, x: Tensor, adapted: AdapterRows | None = None) -> Tensor:
        """[T, hidden] -> [T, hidden], of the model's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """The activated gate times the rest, both of one product."""

    activate_and_mul: Activate
    gate_up: Projection
    down: Projection

    def __call__(self, x: Tensor, adapted: AdapterRows | None = None) -> Tensor:
        return self.down(self.activate_and_mul(self.gate_up(x, adapted)), adapted)


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """Without a gate."""

    activate: Activate
    up: Projection
    down: Projection

    def __call__(self, x: Tensor, adapted: AdapterRows | None = None) -> Tensor:
        return self.down(self.activate(self.up(x, adapted)), adapted)


@dataclass(frozen=True, slots=True)
class Experts:
    """A router gives each token to a few of many MLPs, and their results are added by its weights.

    No adapter changes them.
    """

    router: Linear
    experts: tuple[MLP, ...]
    chosen: int
    normalised: bool

    def __call__(self, x: Tensor, adapted: AdapterRows | None = None) -> Tensor:
        weights, numbers = self.route(x)
        order = numbers.flatten().argsort(stable=True)
        tokens, weights = order // self.chosen, weights.flatten()[order, None]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        first = 0
        for expert, count in enumerate(numbers.flatten().bincount(minlength=len(self.experts)).tolist()):
            if count:
                mine = slice(first, first + count)
                out.index_add_(0, tokens[mine], self.experts[expert](x[tokens[mine]]) * weights[mine])
                first += count
        return out.to(x.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts of each token: weights float32 [T, chosen] and numbers."""
        weights, numbers = self.router(x).float().softmax(-1).topk(self.chosen)
        return (weights / weights.sum(-1, keepdim=True) if self.normalised else weights), numbers


def gated(activation: Activation, kernels: Kernels, ops: Mapping[str, Operation]) -> Activate:
    """The operation of a gated MLP: one of `ops` (`engine.model.ops`), else the built-in one."""
    return gated_by(ops, activation) or {"silu": kernels.silu_and_mul, "gelu_tanh": kernels.gelu_and_mul}[activation]


def plain(activation: Activation, ops: Mapping[str, Operation]) -> Activate:
    """The operation of an MLP without a gate: one of `ops`, else the built-in one."""
    built_in: Activate = functional.silu if activation == "silu" else partial(functional.gelu, approximate="tanh")
    return plain_by(ops, activation) or built_in
