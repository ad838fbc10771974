"""Sampling parameters of one step, and its random numbers, in plain Python: no torch here.

Every implementation of the kernels takes its random numbers from `uniform`, so a seed means the
same on each device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

GREEDY_TEMPERATURE = 1e-5
"""Below it a row is greedy: the scaled logits would leave float32."""

NO_TOKEN = -1
"""Stands for the token of a row whose greatest logit is no finite number."""

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Changes to one row's logits, applied in the order of the fields, greedy or not.

    Repetition divides positive logits and multiplies negative ones, for tokens of the prompt or the
    output; frequency subtracts for each occurrence in the output, presence once for any.
    """

    tokens: Sequence[int] = ()
    """Every token known; empty if there are no penalties."""
    prompt_tokens: int = 0
    """How many of `tokens` are the prompt."""
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    """(token id, addition)."""
    allowed: bytes | None = None
    """One bit for each id of the vocabulary, the lowest of a byte first; ids without it are masked."""


class TokenLogprobs(NamedTuple):
    """The raw log-softmax of one row: before temperature, cuts, penalties and masks."""

    token: int
    logprob: float
    rank: int
    """1 for the likeliest, equal ones in order of their ids."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and their logprobs, in descending order, equal ones by id."""


class Sampled(NamedTuple):
    """What a step chose for its S rows."""

    tokens: list[int]
    """[S]; the forced token of a forced row, whatever the other parameters of that row say. `NO_TOKEN` of a row without
    a finite greatest logit to choose by; NaNs beside numbers may count for that or for nothing."""
    logprobs: list[TokenLogprobs | None] | None = None
    """[S], or None if no row reports."""
    pooled: Sequence[NDArray[np.float32]] | None = None
    """[N] sums of last hidden states [hidden], one for each text that takes part in an embedding; None for none."""

    def reports(self, first: int, end: int) -> list[TokenLogprobs]:
        """Those of rows `first : end` that report."""
        return [report for report in (self.logprobs or ())[first:end] if report is not None]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of the S rows of a step. Plain sequences: most rows of most steps are greedy.

    A row keeps the tokens whose probability at its temperature is at least `min_p` times the
    greatest, of these the `top_k` likeliest, of these the likeliest whose probabilities (scaled to
    the sum of those that are left) reach `top_p`; at least one, always. Equal logits are ordered by
    id. It then draws one of them by their probabilities.
    """

    temperature: tuple[float, ...]
    """0 for greedy rows."""
    top_k: tuple[int, ...]
    """0 or -1 keeps all."""
    top_p: tuple[float, ...]
    """0 keeps the likeliest token."""
    min_p: tuple[float, ...]
    """1 keeps the likeliest token."""
    seed: tuple[int, ...]
    position: tuple[int, ...]
    """Position in the sequence of the token to be chosen."""
    banned: tuple[tuple[int, ...], ...]
    """Token ids masked to -inf in each row, after its `adjust`: ends of text before `min_tokens`, bad words.

    One token at least is always left. Ids past the vocabulary are not listed: the model cuts its
    logits to `ModelInfo.vocab_size`.
    """
    adjust: tuple[Adjustment | None, ...] | None = None
    """What changes a row's logits before anything is chosen; None if no row has any."""
    forced: tuple[int, ...] | None = None
    """The token of a row that is scored and not sampled, -1 for the others; None if no row is forced."""
    logprobs: tuple[int, ...] | None = None
    """Likeliest tokens to report of each row beside the chosen one, -1 for none at all; None if no row reports."""

    def part(self, first: int, end: int) -> SamplingBatch:
        """The parameters of rows `first : end`."""
        columns: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return SamplingBatch(**{name: column and column[first:end] for name, column in columns.items()})

    def is_greedy(self, row: int) -> bool:
        """Whether the row takes the greatest logit and needs no random number."""
        return (
            self.temperature[row] < GREEDY_TEMPERATURE
            or self.top_k[row] == 1
            or self.top_p[row] <= 0
            or self.min_p[row] >= 1
        )


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a pure function of (seed, position): no state, so no neighbour can shift it.

    The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
    OOPSLA 2014) hashes the seed, then the hash offset by `position` steps of that generator.
    """
    return (_mix((_mix(seed & _MASK) + (position + 1) * _GAMMA) & _MASK) >> 11) * 2.0**-53


def choice_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request that asks for several: the first has the request's own.

    The others have the top 63 bits of output `index` of SplitMix64 with the state `seed`.
    """
    return seed if index == 0 else _mix((seed + index * _GAMMA) & _MASK) >> 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
