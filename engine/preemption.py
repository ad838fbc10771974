"""How a sequence that makes way comes back: with its pages copied out and in again, or computed once more.

Both give the same tokens; the cheaper one is taken. No torch here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine.memory import Page, PagePool
from engine.memory.swap import SwapSpace
from engine.sequence import TokenSequence

log = logging.getLogger(__name__)

COPY_BYTES_PER_S = 4e9
"""Between the pool and the host, until it is measured."""
COMPUTE_TOKENS_PER_S = 5e3
"""Of prompts, until it is measured."""
LEAST_S = 1e-3
"""What took less is not measured: it would be the clock that is measured."""
LEAST_TOKENS = 64
"""Smaller steps are bound by reading the weights and say little about what a token costs."""
WEIGHT = 0.2
"""Of the newest measurement in the mean."""


class Preemption:
    """Saves the KV of sequences that make way, where that costs less than to compute it again."""

    def __init__(
        self, pool: PagePool, swap: SwapSpace | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._pool = pool
        self._swap = swap
        self._clock = clock
        self.copy_bytes_per_s = COPY_BYTES_PER_S
        self.compute_tokens_per_s = COMPUTE_TOKENS_PER_S
        self.swaps = 0
        """Sequences whose pages were copied out, ever."""

    @property
    def swapped_pages(self) -> int:
        """Pages in the host's memory now."""
        return self._swap.used_pages if self._swap is not None else 0

    def save(self, sequence: TokenSequence) -> None:
        """Copy out what the sequence has computed, if that pays and there is room; its pages are not touched.

        One that has given pages back is computed again: it begins with all of them.
        """
        if sequence.gone_pages:
            return
        swap, pages = self._swap, sequence.pages[: self._pool.pages_for(sequence.slots)]
        if swap is None or not swap.fits(len(pages)) or not self._pays(sequence.computed, len(pages) * swap.page_bytes):
            return
        started_s = self._clock()
        try:
            swap.save(sequence.id, pages)
        except MemoryError:
            log.warning("the host has no memory for %d pages of %s", len(pages), sequence.id)
            return
        sequence.saved_tokens, sequence.saved_evicted = sequence.computed, sequence.evicted
        self.swaps += 1
        took_s = self._clock() - started_s
        if took_s >= LEAST_S:
            self.copy_bytes_per_s = _mean(self.copy_bytes_per_s, len(pages) * swap.page_bytes / took_s)

    def restore(self, sequence: TokenSequence, pages: list[Page], matched: int) -> int:
        """Fill the sequence's new pages, of which the first `matched` were found; how many of its tokens are computed.

        Pages that were found are others' too, so nothing is written to them.
        """
        computed = matched * self._pool.page_size
        if self._swap is not None and sequence.saved_tokens > computed:
            computed, sequence.evicted = sequence.saved_tokens, sequence.saved_evicted
            self._swap.load(sequence.id, pages[: self._pool.pages_for(computed - sequence.evicted)], matched)
        self.discard(sequence)
        return computed

    def discard(self, sequence: TokenSequence) -> None:
        """Give up what was saved of a sequence."""
        if self._swap is not None:
            self._swap.discard(sequence.id)
        sequence.saved_tokens = sequence.saved_evicted = 0

    def note_step(self, tokens: int, took_s: float) -> None:
        """Learn from a step what it takes to compute a token."""
        if tokens >= LEAST_TOKENS and took_s >= LEAST_S:
            self.compute_tokens_per_s = _mean(self.compute_tokens_per_s, tokens / took_s)

    def check(self, waiting: list[TokenSequence]) -> None:
        """Raise AssertionError unless exactly the KV of those who wait for their return is saved."""
        saved = [sequence for sequence in waiting if sequence.saved_tokens]
        if self._swap is None:
            assert not saved, "a request counts on pages that nobody saved"
        else:
            self._swap.check()
            assert len(self._swap) == len(saved), "pages are saved for a request that doesn't wait"
            assert all(sequence.id in self._swap for sequence in saved), "a request's saved pages are lost"

    def _pays(self, tokens: int, size_bytes: int) -> bool:
        return 0 < 2 * size_bytes / self.copy_bytes_per_s < tokens / self.compute_tokens_per_s


def _mean(old: float, new: float) -> float:
    return old + WEIGHT * (new - old)
