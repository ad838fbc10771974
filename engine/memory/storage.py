"""What the engine asks of a model's KV memory, and how it is done in the host's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.memory.arena import Arena
from engine.memory.extents import Move
from kernels.kv import KVLayout


class KVStorage(Protocol):
    """The memory behind page ids. Called between steps only."""

    layout: KVLayout
    units: int
    """Units of the address range: no page lies behind them."""

    def copy_pages(self, moves: Sequence[Move]) -> None:
        """Copy pages; no target is the source of another move."""
        ...

    def save_pages(self, pages: Sequence[int]) -> Any:
        """A copy of the pages' contents in host memory, `layout.page_bytes` for each."""
        ...

    def load_pages(self, saved: Any, pages: Sequence[int]) -> None:
        """Put contents that were saved into so many pages."""
        ...

    def decommit(self, runs: Iterable[tuple[int, int]]) -> None:
        """Give back the memory of runs of units, (first, count), if the device can. Their contents are lost."""
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...


class HostStorage:
    """`KVStorage` in an arena of the host; a kernel reads and writes it through `arena.address` or `arena.bytes`."""

    def __init__(self, arena: Arena, layout: KVLayout) -> None:
        self.layout = layout
        self.arena = arena
        self.units = arena.units

    def copy_pages(self, moves: Sequence[Move]) -> None:
        for source, target in moves:
            self._page(target)[:] = self._page(source)

    def save_pages(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        """[n, page_bytes]"""
        saved = np.empty((len(pages), self.layout.page_bytes), np.uint8)
        for row, page in zip(saved, pages, strict=True):
            row[:] = self._page(page)
        return saved

    def load_pages(self, saved: NDArray[np.uint8], pages: Sequence[int]) -> None:
        for row, page in zip(saved, pages, strict=True):
            self._page(page)[:] = row

    def decommit(self, runs: Iterable[tuple[int, int]]) -> None:
        for first, count in runs:
            self.arena.decommit(first, count)

    def close(self) -> None:
        self.arena.close()

    def _page(self, page: int) -> NDArray[np.uint8]:
        begin = self.layout.offset_bytes(page)
        return self.arena.bytes[begin : begin + self.layout.page_bytes]
