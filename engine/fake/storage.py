"""The fake model's KV: the tokens themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.memory import Move
from kernels.kv import KVLayout


class FakeStorage:
    """`engine.memory.storage.KVStorage` that keeps tokens: each page is a list of them."""

    def __init__(self, layout: KVLayout, units: int) -> None:
        self.layout = layout
        self.units = units
        self._pages: dict[int, list[int]] = {}

    def write(self, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """Put each token into its slot."""
        assert len(set(slots)) == len(slots), "two tokens of one step share a slot"
        size = self.layout.page_size
        limit = (self.units >> self.layout.extent_order) * self.layout.pages_per_extent
        for token, slot in zip(tokens, slots, strict=True):
            page, offset = divmod(slot, size)
            assert 0 <= page < limit, f"page {page} is outside the pool of {limit}"
            self._pages.setdefault(page, [-1] * size)[offset] = token

    def read(self, pages: Sequence[int], length: int) -> list[int]:
        """The first `length` tokens of a request's pages; a page that holds nothing is left out."""
        context: list[int] = []
        for page in pages[: -(-length // self.layout.page_size)]:
            context += self._pages.get(page, ())
        del context[length:]
        return context

    def copy_pages(self, moves: Sequence[Move]) -> None:
        assert not {move.source for move in moves} & {move.target for move in moves}
        for source, target in moves:
            self._pages[target] = list(self._pages.get(source, [-1] * self.layout.page_size))

    def save_pages(self, pages: Sequence[int]) -> list[list[int]]:
        return [list(self._pages[page]) for page in pages]

    def load_pages(self, saved: list[list[int]], pages: Sequence[int]) -> None:
        for content, page in zip(saved, pages, strict=True):
            self._pages[page] = list(content)

    def decommit(self, runs: Iterable[tuple[int, int]]) -> None:
        for first, count in runs:
            per_extent, order = self.layout.pages_per_extent, self.layout.extent_order
            for page in range((first >> order) * per_extent, ((first + count) >> order) * per_extent):
                self._pages.pop(page, None)

    def close(self) -> None:
        self._pages.clear()
