"""How keys and values lie in the arena, in plain integers: no torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

UNIT_BYTES = 4 * 2**20
"""The arena is committed in units of this size."""
MOST_WASTE = 0.05
"""Share of an extent that may be left over after its pages."""


@dataclass(frozen=True)
class KVLayout:
    """Pages of `page_size` tokens, each with all layers behind one another, carved from extents of one size.

    Page `id` begins at `offset_bytes(id)` of the arena; layer l of it at `l * layer_bytes` behind that. How
    keys and values lie within a layer's block is the kernels' own affair.
    """

    layers: int
    kv_heads: int
    head_size: int
    element_bytes: int
    page_size: int
    scale_bytes: int = 0
    """Beside each token's key and value of one head, in a quantised KV."""

    @cached_property
    def layer_bytes(self) -> int:
        """Keys and values of one page in one layer."""
        return 2 * self.kv_heads * self.page_size * (self.head_size * self.element_bytes + self.scale_bytes)

    @cached_property
    def page_bytes(self) -> int:
        return self.layers * self.layer_bytes

    @cached_property
    def extent_order(self) -> int:
        """An extent is so many doublings of a unit: the fewest that waste at most `MOST_WASTE` of it."""
        order = 0
        while (extent := UNIT_BYTES << order) < self.page_bytes or extent % self.page_bytes > MOST_WASTE * extent:
            order += 1
        return order

    @cached_property
    def extent_bytes(self) -> int:
        return UNIT_BYTES << self.extent_order

    @cached_property
    def pages_per_extent(self) -> int:
        return self.extent_bytes // self.page_bytes

    def offset_bytes(self, page: int) -> int:
        """Where a page begins in the arena."""
        extent, index = divmod(page, self.pages_per_extent)
        return extent * self.extent_bytes + index * self.page_bytes

    def pages_in(self, size_bytes: int) -> int:
        """Pages that fit into a part of the arena that begins with an extent."""
        extents, rest = divmod(size_bytes, self.extent_bytes)
        return extents * self.pages_per_extent + min(rest // self.page_bytes, self.pages_per_extent)

    def bytes_for(self, pages: int) -> int:
        """The smallest part of the arena that holds so many pages: the inverse of `pages_in`."""
        return self.offset_bytes(pages - 1) + self.page_bytes if pages else 0

    def units_for(self, pages: int) -> int:
        """Units of the extents that hold so many pages."""
        return -(-pages // self.pages_per_extent) << self.extent_order


@dataclass(frozen=True, slots=True)
class Thinning:
    """One request's context, of which every head keeps the first tokens, the last, and the best of the middle.

    They move together to the front of its pages, in their order; every head keeps as many, not the same ones.
    """

    pages: Sequence[int]
    """Ids, in the order of the context."""
    tokens: int
    """In the context."""
    kept: int
    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first + self.last <= self.kept <= self.tokens:
            raise ValueError(
                f"{self.kept} of {self.tokens} tokens can't be kept, the first {self.first} and last {self.last} too"
            )
