"""Sampling parameters of one step, and its random numbers, in plain Python: no torch here.

Every implementation of the kernels takes its random numbers from `uniform`, so a seed means the
same on each device.
"""

from __future__ import annotations

from dataclasses import dataclass

GREEDY_TEMPERATURE = 1e-5
"""Below it a row is greedy: the scaled logits would leave float32."""

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


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
    """Token ids masked to -inf in each row: ends of text before `min_tokens`.

    Ids past the vocabulary are not listed: the model cuts its logits to `ModelInfo.vocab_size`.
    """

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


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
