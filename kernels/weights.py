"""Weights of one byte, or half of one, for each number: inputs that follow one another share a scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

Bits = Literal[8, 4]
GROUP = 64
"""Inputs that share a scale where nothing else says how many."""
RUN = 64
"""Inputs of four bits whose halves share bytes: byte j of a run holds input j (low half) and input j + RUN / 2."""
_LEVELS: dict[Bits, tuple[int, int]] = {8: (-127, 127), 4: (-8, 7)}


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight [out, in] of which each number is an integer times the scale of its group of inputs."""

    bits: Bits
    numbers: Tensor
    """[out, in] int8; of four bits [out, in / 2] uint8, two numbers of 0 to 15 in each, as `RUN` says."""
    scales: Tensor
    """[out, in / group], float32 or float16"""
    minimums: Tensor | None = None
    """[out, in / group] of four bits alone: what a 0 stands for; None if that is -8 times the scale."""

    @classmethod
    def rounded(cls, weight: Tensor, bits: Bits, group: int = GROUP) -> Self:
        """A weight [out, in] of floats, to the nearest.

        In 8 bits a group's scale is symmetric around 0; in 4 its greatest number is -8 steps, so that none of the 16
        is wasted.
        """
        outputs, inputs = weight.shape
        if inputs % max(group, RUN if bits == 4 else 1):
            raise ValueError(f"a weight of {inputs} inputs can't be cut into groups of {group}")
        groups = weight.float().reshape(outputs, -1, group)
        least, most = _LEVELS[bits]
        if bits == 8:
            scales = groups.abs().amax(-1) / most
        else:
            scales = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1) / least
        steps = groups / torch.where(scales == 0, 1.0, scales)[..., None]
        numbers = steps.round_().clamp_(least, most).to(torch.int8).view(outputs, inputs)
        return cls(bits, numbers if bits == 8 else pack_int4((numbers - least).to(torch.uint8)), scales)

    @classmethod
    def joined(cls, parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
        """Weights of the same inputs, bits and group as one: their outputs one behind the other."""
        if len(parts) == 1:
            return parts[0]
        minimums = None
        if any(part.minimums is not None for part in parts):
            minimums = torch.cat([part.zeros for part in parts])
        numbers, scales = (
            torch.cat(of_parts) for of_parts in zip(*((p.numbers, p.scales) for p in parts), strict=True)
        )
        return cls(parts[0].bits, numbers, scales, minimums)

    @property
    def out_features(self) -> int:
        return len(self.numbers)

    @property
    def in_features(self) -> int:
        return self.numbers.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.in_features // self.scales.shape[1]

    @property
    def zeros(self) -> Tensor:
        """[out, in / group]: what a 0 of four bits stands for."""
        return self.minimums if self.minimums is not None else self.scales * _LEVELS[4][0]

    def restored(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Some rows as numbers again, [rows, in] of `dtype`."""
        numbers, scales = self.numbers[rows], self.scales[rows].float()[..., None]
        if self.bits == 4:
            numbers = unpack_int4(numbers)
        groups = numbers.float().view(*scales.shape[:2], self.group).mul_(scales)
        if self.bits == 4:
            groups += self.zeros[rows].float()[..., None]
        return groups.flatten(1).to(dtype)


def pack_int4(numbers: Tensor) -> Tensor:
    """uint8 [out, in] of 0 to 15 -> uint8 [out, in / 2], two in each."""
    low, high = numbers.view(len(numbers), -1, 2, RUN // 2).unbind(2)
    return (low | (high << 4)).flatten(1)


def unpack_int4(packed: Tensor) -> Tensor:
    """uint8 [out, in / 2] -> uint8 [out, in] of 0 to 15."""
    halves = packed.view(len(packed), -1, RUN // 2)
    return torch.stack([halves & 15, halves >> 4], dim=2).flatten(1)
