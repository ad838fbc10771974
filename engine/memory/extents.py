"""Blocks leased for KV, cut into pages of one size: where each page lies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.memory.buddy import Buddy


class Page:
    """A handle. `id` says where the page lies and changes when it is moved, so nobody keeps ids from step to step."""

    __slots__ = ("hash", "id", "refs")

    def __init__(self, id: int = -1) -> None:  # noqa: A002
        self.id = id
        self.refs = 1
        self.hash: bytes | None = None
        """Set once the page's content is complete and known by it."""

    def __repr__(self) -> str:
        return f"Page({self.id}, refs={self.refs}{', known' if self.hash else ''})"


class Move(NamedTuple):
    """The content of page `source` goes to page `target`, ids both."""

    source: int
    target: int


class Extent:
    """One leased block: which of its places are taken, and by which page."""

    __slots__ = ("number", "pages", "places")

    def __init__(self, number: int, places: int) -> None:
        self.number = number
        self.places = list(range(places - 1, -1, -1))
        """Free places; the last one is taken next, so that pages stay warm and an extent is filled from its front."""
        self.pages: list[Page | None] = [None] * places


class Extents:
    """Extents of `2 ** order` units, each with places for `pages_per_extent` pages.

    Page `id` lies in extent `id // pages_per_extent`, and extent n begins at unit `n << order`. A page
    goes to the fullest extent that has a place, so that others empty; an empty one goes back at once.
    """

    def __init__(self, buddy: Buddy, order: int, pages_per_extent: int) -> None:
        self.buddy = buddy
        self.order = order
        self.pages_per_extent = pages_per_extent
        self.free = 0
        """Free places in leased extents."""
        self._leased: dict[int, Extent] = {}
        self._open: list[dict[int, Extent]] = [{} for _ in range(pages_per_extent + 1)]
        """Extents by their number of free places."""
        self._open_mask = 0
        """Bit n is set if there are extents with n free places."""

    @property
    def leased(self) -> int:
        return len(self._leased)

    @property
    def occupied(self) -> int:
        """Places that are taken."""
        return len(self._leased) * self.pages_per_extent - self.free

    @property
    def ids(self) -> int:
        """Every page id is under it."""
        return (self.buddy.units >> self.order) * self.pages_per_extent

    @property
    def room(self) -> int:
        """Places, free or in extents that could be leased now."""
        return self.free + self.buddy.room(self.order) * self.pages_per_extent

    def place(self, page: Page) -> None:
        """Give a page a place; leases an extent if all are full. Raises OutOfUnits."""
        if not self.free:
            number = self.buddy.allocate(self.order, "kv") >> self.order
            extent = self._leased[number] = Extent(number, self.pages_per_extent)
            self.free += self.pages_per_extent
            self._file(extent)
        self._put(page, self._fullest())

    def remove(self, page: Page) -> None:
        """Take a page from its place."""
        number, place = divmod(page.id, self.pages_per_extent)
        extent = self._leased[number]
        self._unfile(extent)
        extent.pages[place] = None
        extent.places.append(place)
        self.free += 1
        self._refile(extent)

    def compact(self, most_pages: int) -> list[Move]:
        """Move up to so many pages out of the emptiest extents, as long as that can empty one.

        No target is the source of another move, so the moves may be carried out in any order.
        """
        origins: dict[Page, int] = {}
        left = most_pages
        while left > 0 and (extent := self._emptiest()) is not None:
            self._unfile(extent)
            for place in [place for place, page in enumerate(extent.pages) if page is not None][:left]:
                page = extent.pages[place]
                assert page is not None
                origins.setdefault(page, page.id)
                self._put(page, self._fullest())
                extent.pages[place] = None
                extent.places.append(place)
                self.free += 1
                left -= 1
            self._refile(extent)
        return [Move(origin, page.id) for page, origin in origins.items()]

    def check(self) -> None:
        """Raise AssertionError unless places, pages and counts agree."""
        free = 0
        for number, extent in self._leased.items():
            taken = {place for place, page in enumerate(extent.pages) if page is not None}
            assert extent.number == number
            assert sorted({*taken, *extent.places}) == list(range(self.pages_per_extent)), "a place is lost"
            assert len(taken) + len(extent.places) == self.pages_per_extent, "a place is both free and taken"
            assert taken, f"extent {number} is empty and leased"
            for place in taken:
                page = extent.pages[place]
                assert page is not None
                assert page.id == number * self.pages_per_extent + place, f"{page} lies elsewhere"
            assert number in self._open[len(extent.places)], f"extent {number} is filed wrongly"
            free += len(extent.places)
        assert free == self.free, "free places are miscounted"
        assert sum(map(len, self._open)) == len(self._leased), "an extent is filed twice"
        assert self._open_mask == sum(1 << n for n, filed in enumerate(self._open) if filed), "the mask is wrong"
        leased = {number << self.order: self.order for number in self._leased}
        assert self.buddy.leased("kv") == leased, "the buddy allocator and the extents differ"
        self.buddy.check()

    def __iter__(self) -> Iterator[Page]:
        """Every page that has a place."""
        for extent in self._leased.values():
            yield from (page for page in extent.pages if page is not None)

    def _put(self, page: Page, extent: Extent) -> None:
        self._unfile(extent)
        place = extent.places.pop()
        extent.pages[place] = page
        page.id = extent.number * self.pages_per_extent + place
        self.free -= 1
        self._file(extent)

    def _fullest(self) -> Extent:
        """The extent with the fewest free places, but not none."""
        mask = self._open_mask & ~1
        return next(iter(self._open[(mask & -mask).bit_length() - 1].values()))

    def _emptiest(self) -> Extent | None:
        """The extent with the most free places, if the others have places for all its pages."""
        if not self.free:
            return None
        places = self._open_mask.bit_length() - 1
        if self.free - places < self.pages_per_extent - places:
            return None
        return next(iter(self._open[places].values()))

    def _file(self, extent: Extent) -> None:
        places = len(extent.places)
        self._open[places][extent.number] = extent
        self._open_mask |= 1 << places

    def _unfile(self, extent: Extent) -> None:
        places = len(extent.places)
        del self._open[places][extent.number]
        if not self._open[places]:
            self._open_mask ^= 1 << places

    def _refile(self, extent: Extent) -> None:
        """File an extent whose pages have left; if all have, it goes back."""
        if len(extent.places) < self.pages_per_extent:
            self._file(extent)
        else:
            del self._leased[extent.number]
            self.free -= self.pages_per_extent
            self.buddy.free(extent.number << self.order)
