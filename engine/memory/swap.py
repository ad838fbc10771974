"""Host memory for the pages of sequences that had to make way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.memory.extents import Page
from engine.memory.storage import KVStorage


class Swapped(NamedTuple):
    """One sequence's pages."""

    pages: int
    contents: Any


class SwapSpace:
    """Saved pages by the id of their sequence, at most `most_bytes` of them."""

    def __init__(self, storage: KVStorage, most_bytes: int) -> None:
        self.storage = storage
        """Where pages come from and go to; another one after a sleep."""
        self.most_pages = most_bytes // storage.layout.page_bytes
        self.used_pages = 0
        self._saved: dict[str, Swapped] = {}

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._saved

    def __len__(self) -> int:
        return len(self._saved)

    @property
    def page_bytes(self) -> int:
        return self.storage.layout.page_bytes

    @property
    def used_bytes(self) -> int:
        return self.used_pages * self.storage.layout.page_bytes

    def fits(self, pages: int) -> bool:
        """Whether so many more pages could be saved."""
        return self.used_pages + pages <= self.most_pages

    def pages_of(self, sequence_id: str) -> int:
        """How many pages of a sequence are saved: as many it needs to come back."""
        return self._saved[sequence_id].pages

    def save(self, sequence_id: str, pages: Sequence[Page]) -> None:
        """Copy a sequence's pages out, before it gives them up."""
        if sequence_id in self._saved:
            raise ValueError(f"pages of {sequence_id} are saved already")
        if not self.fits(len(pages)):
            raise ValueError(f"{len(pages)} more pages don't fit: {self.used_pages} of {self.most_pages} are in use")
        contents = self.storage.save_pages([page.id for page in pages])
        self._saved[sequence_id] = Swapped(len(pages), contents)
        self.used_pages += len(pages)

    def load(self, sequence_id: str, pages: Sequence[Page], skip: int = 0) -> None:
        """Put a sequence's saved pages into as many new ones, but for the first `skip`; the copy is given up."""
        if len(pages) != self.pages_of(sequence_id):
            raise ValueError(f"{self.pages_of(sequence_id)} pages of {sequence_id} are saved, got {len(pages)}")
        self.storage.load_pages(self._saved[sequence_id].contents[skip:], [page.id for page in pages[skip:]])
        self.discard(sequence_id)

    def discard(self, sequence_id: str) -> None:
        """Forget what was saved of a sequence, if anything."""
        saved = self._saved.pop(sequence_id, None)
        if saved is not None:
            self.used_pages -= saved.pages

    def clear(self) -> None:
        """Forget everything that was saved."""
        self._saved.clear()
        self.used_pages = 0

    def check(self) -> None:
        """Raise AssertionError unless the counts add up within the limit."""
        assert self.used_pages == sum(saved.pages for saved in self._saved.values()), "swapped pages are miscounted"
        assert self.used_pages <= self.most_pages, "more is swapped than may be"
