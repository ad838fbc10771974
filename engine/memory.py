"""KV memory in integers: which pages exist, who holds them, which are free. No torch here."""

from __future__ import annotations

from collections.abc import Iterable


class OutOfPages(RuntimeError):
    """More pages were asked for than are free. The scheduler asks first, so this is a fault of the caller."""


class PagePool:
    """`total` pages of `page_size` tokens, each with a count of its holders. A page is free at a count of 0."""

    def __init__(self, total: int, page_size: int) -> None:
        if total < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages of at least one token, got {total} pages of {page_size}")
        self.total = total
        self.page_size = page_size
        self._refs = [0] * total
        self._free = list(range(total - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def capacity_tokens(self) -> int:
        return self.total * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens of one request."""
        return -(-tokens // self.page_size)

    def allocate(self, n: int) -> list[int]:
        """Take `n` free pages, each with one holder. The last freed are taken first: they are warm."""
        if n > len(self._free):
            raise OutOfPages(f"{n} pages wanted, {len(self._free)} of {self.total} free")
        cut = len(self._free) - n
        pages = self._free[cut:]
        del self._free[cut:]
        pages.reverse()
        for page in pages:
            self._refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each page; all must be held."""
        for page in pages:
            if self._refs[page] < 1:
                raise ValueError(f"page {page} is free and can't be shared")
            self._refs[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Take a holder off each page; those without any are free again."""
        for page in pages:
            if self._refs[page] < 1:
                raise ValueError(f"page {page} is free already")
            self._refs[page] -= 1
            if not self._refs[page]:
                self._free.append(page)

    def check(self, held: Iterable[int] | None = None) -> None:
        """Raise AssertionError unless free and held pages add up, and match the pages that all holders list."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert all((page in free) == (refs == 0) for page, refs in enumerate(self._refs)), "free list and counts differ"
        if held is not None:
            counts = [0] * self.total
            for page in held:
                counts[page] += 1
            assert counts == self._refs, "holders and counts differ"
