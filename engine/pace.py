"""How many drafts bring tokens soonest: what they bring and what they cost, both as measured. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

NEWEST_TIME_WEIGHT = 0.2
"""Of the newest step in the mean time of its size."""
EXACT_TOKENS = 32
"""Steps of more tokens are measured together with others of about as many."""


class StepTimes:
    """How long a model's steps take, by their tokens."""

    def __init__(self) -> None:
        self._means_s: dict[int, float] = {}

    def note(self, tokens: int, took_s: float) -> None:
        size = _size(tokens)
        mean_s = self._means_s.setdefault(size, took_s)
        self._means_s[size] = mean_s + NEWEST_TIME_WEIGHT * (took_s - mean_s)

    def estimate_s(self, tokens: int) -> float:
        """Of a step of so many tokens: that of the next smaller size that was measured, and 0 if none was.

        So what hasn't been tried looks cheap, and is tried.
        """
        size = _size(tokens)
        known = [other for other in self._means_s if other <= size]
        return self._means_s[max(known)] if known else 0.0


def best_count(trusts: Sequence[float], rows: int, most: int, target_s: Callable[[int], float], draft_s: float) -> int:
    """Drafts of each sequence, from 0 to `most`, with which tokens come fastest.

    A sequence whose drafts come true with the chance p gets 1 + p + p^2 + ... + p^k tokens of k drafts. The step has
    then k rows more for each and takes `target_s` of them, and each draft has taken `draft_s`.
    """
    best, fastest = 0, 0.0
    for count in range(most + 1):
        tokens = rows - len(trusts) + sum(sum(trust**place for place in range(count + 1)) for trust in trusts)
        took_s = target_s(rows + count * len(trusts)) + count * draft_s
        rate = tokens / took_s if took_s else tokens
        if rate > fastest:
            best, fastest = count, rate
    return best


def _size(tokens: int) -> int:
    return tokens if tokens <= EXACT_TOKENS else 1 << (tokens.bit_length() - 1)
