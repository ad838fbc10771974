"""Pages by handle: held, cached or free."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from engine.memory.buddy import Buddy, OutOfUnits
from engine.memory.extents import Extents, Move, Page

PAGES_PER_EXTENT = 16
"""Of a pool that has its extents for itself."""


class OutOfPages(RuntimeError):
    """More pages were asked for than are available. The scheduler asks first, so this is a fault of the caller."""


class PagePool:
    """At most `total` pages of `page_size` tokens.

    A page is held by whoever counts in `refs`. When nobody holds it any more it is free, unless its
    content is known by a hash: then it stays cached, can be found again, and gives way to new pages
    when there is no other place, the least recently used first.
    """

    def __init__(self, total: int, page_size: int, extents: Extents | None = None) -> None:
        if total < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages of at least one token, got {total} pages of {page_size}")
        self.total = total
        self.page_size = page_size
        self.extents = extents or Extents(Buddy(-(-total // PAGES_PER_EXTENT)), 0, PAGES_PER_EXTENT)
        self.watermark_pages = 0
        """Admission keeps so many available while others run, for them to grow into."""
        self.evictions = 0
        """Cached pages that gave way, ever."""
        self._known: dict[bytes, Page] = {}
        """Pages that can be found, held or cached."""
        self._cached: OrderedDict[bytes, Page] = OrderedDict()
        """Known pages that nobody holds, the least recently used first."""

    @property
    def available(self) -> int:
        """Pages that could be allocated now: free, cached, and not yet leased."""
        room = self.extents.room + len(self._cached)
        return min(self.total - self.held, room)

    @property
    def held(self) -> int:
        """Pages that somebody holds."""
        return self.extents.occupied - len(self._cached)

    @property
    def cached(self) -> int:
        """Pages that nobody holds and that can be found."""
        return len(self._cached)

    @property
    def capacity_tokens(self) -> int:
        return self.total * self.page_size

    @property
    def fragmentation(self) -> float:
        """Share of the places in leased extents that is free."""
        capacity = self.extents.leased * self.extents.pages_per_extent
        return self.extents.free / capacity if capacity else 0.0

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens of one request."""
        return -(-tokens // self.page_size)

    def allocate(self, n: int) -> list[Page]:
        """Take `n` pages, each with one holder. Cached ones give way only if there is no other place."""
        if n > self.available:
            raise OutOfPages(f"{n} pages wanted, {self.available} of {self.total} available")
        pages = []
        for _ in range(n):
            if self.extents.occupied == self.total:
                self._evict()
            page = Page()
            try:
                self.extents.place(page)
            except OutOfUnits:
                self._evict()
                self.extents.place(page)
            pages.append(page)
        return pages

    def hold(self, pages: Iterable[Page]) -> None:
        """Add a holder to each page; all must be held."""
        for page in pages:
            if page.refs < 1:
                raise ValueError(f"{page} is held by nobody and can't be shared")
            page.refs += 1

    def release(self, pages: Sequence[Page]) -> None:
        """Take a holder off each of a request's pages, in their order; they are cached or free without any.

        The last page of a chain counts as used before its first: it gives way earlier.
        """
        for page in reversed(pages):
            if page.refs < 1:
                raise ValueError(f"{page} is held by nobody already")
            page.refs -= 1
            if page.refs:
                continue
            if page.hash is None:
                self.extents.remove(page)
            else:
                self._cached[page.hash] = page

    def match(self, hashes: Sequence[bytes]) -> list[Page]:
        """The longest run of known pages from the start, each with one more holder."""
        pages = []
        for wanted in hashes:
            page = self._known.get(wanted)
            if page is None:
                break
            if not page.refs:
                del self._cached[wanted]
            page.refs += 1
            pages.append(page)
        return pages

    def publish(self, page: Page, hash: bytes) -> None:  # noqa: A002
        """The content of a held page is complete: it may be found from now on, unless another page is for this hash."""
        if page.refs < 1:
            raise ValueError(f"{page} is held by nobody and can't be published")
        if page.hash not in (None, hash):
            raise ValueError(f"{page} is known by another hash already")
        if self._known.setdefault(hash, page) is page:
            page.hash = hash

    def unpublish(self, hash: bytes) -> None:  # noqa: A002
        """Let nobody find the page of this hash any more, if there is one: its content is of no use."""
        page = self._known.pop(hash, None)
        if page is not None:
            page.hash = None
            if not page.refs:
                del self._cached[hash]
                self.extents.remove(page)

    def drop_cached(self) -> None:
        """Free every cached page."""
        while self._cached:
            self._evict()

    def forget(self) -> None:
        """Free every cached page, and let no held one be found any more."""
        self.drop_cached()
        for page in self._known.values():
            page.hash = None
        self._known.clear()

    def compact(self, most_pages: int) -> list[Move]:
        """Move up to so many pages together so that extents become empty.

        The handles have their new ids at once: the moves must be carried out, in any order, before
        anything reads or writes a page.
        """
        return self.extents.compact(most_pages)

    def resize(self, total: int) -> list[Move]:
        """Let the pool have at most `total` pages; no fewer may be held.

        Cached pages that are too many give way, and the others move together into as few extents as can be;
        the moves must be carried out as those of `compact`.
        """
        if total < max(1, self.held):
            raise ValueError(f"{self.held} pages are held, the pool can't have {total}")
        if total > self.extents.ids:
            raise ValueError(f"there are addresses for {self.extents.ids} pages, not for {total}")
        shrinks = total < self.total
        self.total = total
        while self.extents.occupied > total:
            self._evict()
        return self.compact(self.extents.occupied) if shrinks else []

    def check(self, held: Iterable[Page] | None = None) -> None:
        """Raise AssertionError unless places, counts and hashes agree, and match the pages that all holders list."""
        self.extents.check()
        pages = list(self.extents)
        assert len(pages) == self.extents.occupied == len(set(pages)), "a page has two places"
        assert len(pages) <= self.total, "more pages than the pool may have"
        for page in pages:
            if page.refs:
                assert page.hash is None or page.hash not in self._cached, f"{page} is held and cached"
            else:
                assert page.hash is not None, f"{page} is lost"
                assert self._cached.get(page.hash) is page, f"{page} is lost"
            assert page.hash is None or self._known.get(page.hash) is page, f"{page} can't be found"
        assert {page.hash for page in pages if page.hash} == self._known.keys(), "a page is known and has no place"
        assert self._cached.keys() <= self._known.keys(), "a page is cached and can't be found"
        if held is not None:
            counts = Counter(held)
            assert counts == {page: page.refs for page in pages if page.refs}, "holders and counts differ"

    def _evict(self) -> None:
        """Free the cached page that was used least recently."""
        wanted, page = self._cached.popitem(last=False)
        del self._known[wanted]
        page.hash = None
        self.extents.remove(page)
        self.evictions += 1
