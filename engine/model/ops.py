"""Custom operations in the place of built-in ones: which there are, and what they have to keep to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.model.spec import Activation, ModelSpec
from kernels.custom import CustomOp

logger = logging.getLogger(__name__)

Operation = Callable[..., Any]
"""A `CustomOp`, or any function of tensors that also takes those of torch's meta device."""
REPLACEABLE = {
    "gelu": "an activation, [...] -> [...]: GELU by its tanh form",
    "silu": "an activation, [...] -> [...]: SiLU",
    "gelu_and_mul": "a gated activation, [T, 2 * inner] -> [T, inner]: GELU of the first half, times the second",
    "silu_and_mul": "a gated activation, [T, 2 * inner] -> [T, inner]: SiLU of the first half, times the second",
}
_NAMES: Mapping[Activation, str] = {"silu": "silu", "gelu_tanh": "gelu"}
_TRIAL_TOKENS, _TRIAL_INNER = 3, 8


def usable_ops(
    ops: Mapping[str, Operation], spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> dict[str, Operation]:
    """Those of `ops` that can run on `device`. Raises ValueError for one that doesn't fit the model.

    One that can't run there leaves the built-in operation in its place, with a warning.
    """
    usable: dict[str, Operation] = {}
    for name, op in ops.items():
        _check_name(name, ops, spec)
        _check_shapes(name, op, dtype)
        obstacle = op.obstacle(device) if isinstance(op, CustomOp) else None
        if obstacle is None:
            usable[name] = op
        else:
            logger.warning("the built-in %s stays in the place of the custom one: %s", name, obstacle)
    return usable


def gated_by(ops: Mapping[str, Operation], activation: Activation) -> Operation | None:
    """What makes an MLP's gate and product of it, if that is replaced: [T, 2 * inner] -> [T, inner]."""
    name = _NAMES[activation]
    whole, gate_alone = ops.get(f"{name}_and_mul"), ops.get(name)
    if whole is not None or gate_alone is None:
        return whole

    def activate_and_mul(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated: Tensor = gate_alone(gate.contiguous())
        return activated * up

    return activate_and_mul


def plain_by(ops: Mapping[str, Operation], activation: Activation) -> Operation | None:
    """What activates an MLP without a gate, if that is replaced."""
    return ops.get(_NAMES[activation])


def _check_name(name: str, ops: Mapping[str, Operation], spec: ModelSpec) -> None:
    if name not in REPLACEABLE:
        known = "; ".join(f"{own} ({what})" for own, what in REPLACEABLE.items())
        raise ValueError(f"no operation {name!r} can be replaced. These can: {known}")
    alone = _NAMES[spec.activation]
    own = (alone, f"{alone}_and_mul") if spec.gated else (alone,)
    if name not in own:
        raise ValueError(f"this model computes no {name}: of its operations, {' or '.join(own)} can be replaced")
    if len(ops.keys() & set(own)) > 1:
        raise ValueError(f"{alone} is a part of {alone}_and_mul: replace one of them")


def _check_shapes(name: str, op: Operation, dtype: torch.dtype) -> None:
    """Try it on tensors without content."""
    halves = 2 if name.endswith("_and_mul") else 1
    trial = torch.empty(_TRIAL_TOKENS, halves * _TRIAL_INNER, dtype=dtype, device="meta")
    try:
        result = op(trial)
    except Exception as error:
        raise ValueError(
            f"{name} is called with one tensor {list(trial.shape)} of {dtype} by this model, and the operation refuses "
            f"it: {error}. Write it for that type, or load the model with another dtype"
        ) from error
    shape = (_TRIAL_TOKENS, _TRIAL_INNER)
    if not isinstance(result, Tensor) or tuple(result.shape) != shape or result.dtype != dtype:
        made = f"{list(result.shape)} of {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(f"{name} must make {list(shape)} of {dtype} from {list(trial.shape)}, and makes {made}")
