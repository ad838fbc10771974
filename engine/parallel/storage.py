"""The KV memory of all ranks, whose pages have the same numbers everywhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from engine.memory import Move
from engine.memory.storage import KVStorage

T = TypeVar("T")


class Everywhere(Protocol):
    """Has all ranks do something, the first by `own`; returns that."""

    def __call__(self, own: Callable[[], T], name: str, *arguments: Any) -> T: ...


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Saved:
    """Pages that every rank has saved: here the first rank's, and the number under which the others keep theirs."""

    contents: Any
    number: int
    first: int = 0
    """Pages in front that are left out."""
    whole: Saved | None = None
    """What this is the rest of; the others' copies are kept as long as that."""

    def __getitem__(self, rest: slice) -> Saved:
        """Without some pages in front."""
        return Saved(self.contents[rest], self.number, self.first + (rest.start or 0), self.whole or self)


class ParallelStorage:
    """`engine.memory.storage.KVStorage`."""

    def __init__(self, own: KVStorage, everywhere: Everywhere, numbers: Iterator[int], forgotten: list[int]) -> None:
        """What is saved gets one of `numbers`; `forgotten` takes those that the other ranks needn't keep any more."""
        self.layout = own.layout
        self.units = own.units
        self._own = own
        self._everywhere = everywhere
        self._forgotten = forgotten
        self._numbers = numbers

    def copy_pages(self, moves: Sequence[Move]) -> None:
        if moves:
            self._everywhere(lambda: self._own.copy_pages(moves), "copy_pages", list(moves))

    def save_pages(self, pages: Sequence[int]) -> Saved:
        number = next(self._numbers)
        contents = self._everywhere(lambda: self._own.save_pages(pages), "save_pages", number, list(pages))
        saved = Saved(contents, number)
        weakref.finalize(saved, self._forgotten.append, number)
        return saved

    def load_pages(self, saved: Saved, pages: Sequence[int]) -> None:
        own = saved.contents
        self._everywhere(lambda: self._own.load_pages(own, pages), "load_pages", saved.number, saved.first, list(pages))

    def decommit(self, runs: Iterable[tuple[int, int]]) -> None:
        given = list(runs)
        if given:
            self._everywhere(lambda: self._own.decommit(given), "decommit", given)

    def close(self) -> None:
        self._own.close()
