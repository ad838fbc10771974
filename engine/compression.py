"""How much of a long request's KV is kept, and when the rest is dropped. Integers only, no torch.

A request is thinned at fixed positions, every `step_tokens`, whatever its prompt, its chunks and its neighbours are:
what it has in its pages depends on its own tokens alone. So it is the same alone and in a batch, and when it is
computed once more.

    known         0 ────────────────────────── b ─────────── n
    kept          sinks │ best of the middle │ last step      │ all since b
                  ╰── max(sinks + step, ratio * b) of b ──────╯
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from kernels.kv import Thinning


@dataclass(frozen=True)
class KVCompression:
    """The share of each request's tokens whose keys and values are kept; 1 keeps all."""

    ratio: float = 1.0
    sink_tokens: int = 4
    """The first ones, which all others lean on."""
    window_tokens: int = 256
    """A request holds up to so many tokens more than its share; of the last ones, half of them at least are kept."""

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, int | float) or not 0 < self.ratio <= 1:
            raise ValueError(
                f"kv_compression.ratio is the share of a request's tokens that is kept, got {self.ratio!r}: set it to a"
                " number over 0 and at most 1, and to 1 to keep all"
            )
        for name, least in (("sink_tokens", 0), ("window_tokens", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"kv_compression.{name} must be a whole number, at least {least}, got {value!r}")

    @property
    def thins(self) -> bool:
        return self.ratio < 1

    @cached_property
    def step_tokens(self) -> int:
        """Between two positions at which a request is thinned."""
        return self.window_tokens // 2

    @cached_property
    def first_stop(self) -> int:
        """The first position at which something may be dropped: there is more than what is kept anyway."""
        return ((self.sink_tokens + self.step_tokens) // self.step_tokens + 1) * self.step_tokens

    def touches(self, tokens: int) -> bool:
        """Whether a request of so many tokens is ever thinned."""
        return self.thins and tokens > self.first_stop

    def next_stop(self, computed: int) -> int:
        """The position up to which more tokens may be computed before the request is thinned again."""
        return max(self.first_stop, (computed // self.step_tokens + 1) * self.step_tokens)

    def slots(self, computed: int) -> int:
        """Tokens that are kept of so many, thinned as often as it was due."""
        if not self.thins or computed < self.first_stop:
            return computed
        stop = computed // self.step_tokens * self.step_tokens
        return self._left(stop) + computed - stop

    def most_slots(self, tokens: int) -> int:
        """The most that a request ever holds on its way to so many tokens computed."""
        if not self.thins or tokens <= self.first_stop:
            return tokens
        stop = (tokens - 1) // self.step_tokens * self.step_tokens
        return max(self._left(stop) + tokens - stop, self._left(stop - self.step_tokens) + self.step_tokens)

    def due(self, computed: int, slots: int) -> bool:
        """Whether a request that holds so many has to be thinned before it goes on."""
        return slots > self.slots(computed)

    def thinning(self, pages: list[int], computed: int, slots: int) -> Thinning:
        """What is to be done to a request that is due."""
        return Thinning(
            pages=pages, tokens=slots, kept=self.slots(computed), first=self.sink_tokens, last=self.step_tokens
        )

    def _left(self, stop: int) -> int:
        """Tokens that are kept of those before a position at which the request is thinned."""
        return min(stop, max(self.sink_tokens + self.step_tokens, ceil(self.ratio * stop)))
