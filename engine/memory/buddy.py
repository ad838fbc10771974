"""The arena's units in powers of two: who leases which blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal, NamedTuple

Owner = Literal["kv", "lora", "swap", "scratch"]


class OutOfUnits(RuntimeError):
    """No free block is large enough."""


class Block(NamedTuple):
    """A leased block of `2 ** order` units."""

    order: int
    owner: Owner


class Buddy:
    """`units` units, leased in blocks of `2 ** order` units that begin at a multiple of their size.

    A block is split in halves until it has the size that is wanted; a half that becomes free joins
    its other half if that is free too. The smallest free block that
    fits is taken, and the lowest of these.
    """

    def __init__(self, units: int) -> None:
        if units < 1:
            raise ValueError(f"a buddy allocator needs at least one unit, got {units}")
        self.units = units
        self._free = [0] * units.bit_length()
        """By order, a bitmap: bit i stands for the block at `i << order`."""
        self._leased: dict[int, Block] = {}
        self._stale = 0
        """Bitmap of free units that were leased before: their memory is still committed."""
        self._aged = 0
        """Bitmap of those that were stale already when `take_aged` was called last."""
        offset = 0
        for order in reversed(range(units.bit_length())):
            if units >> order & 1:
                self._free[order] |= 1 << (offset >> order)
                offset += 1 << order

    def allocate(self, order: int, owner: Owner) -> int:
        """Lease a block; its first unit."""
        split = order
        while split < len(self._free) and not self._free[split]:
            split += 1
        if split >= len(self._free):
            raise OutOfUnits(f"no block of {1 << order} units is free for {owner}")
        lowest = self._free[split] & -self._free[split]
        self._free[split] ^= lowest
        offset = (lowest.bit_length() - 1) << split
        while split > order:
            split -= 1
            self._free[split] |= 1 << ((offset >> split) + 1)
        self._leased[offset] = Block(order, owner)
        self._stale &= ~_mask(offset, order)
        self._aged &= self._stale
        return offset

    def free(self, offset: int) -> None:
        """Give back the block that begins at unit `offset`."""
        if offset not in self._leased:
            raise ValueError(f"no leased block begins at unit {offset}")
        order = self._leased.pop(offset).order
        self._stale |= _mask(offset, order)
        index = offset >> order
        while self._free[order] >> (index ^ 1) & 1:
            self._free[order] ^= 1 << (index ^ 1)
            index >>= 1
            order += 1
        self._free[order] |= 1 << index

    def room(self, order: int) -> int:
        """Blocks of this order that could be leased now."""
        return sum(self._free[at].bit_count() << (at - order) for at in range(order, len(self._free)))

    def leased(self, owner: Owner) -> dict[int, int]:
        """Blocks of one owner: their first unit and their order."""
        return {offset: block.order for offset, block in self._leased.items() if block.owner == owner}

    def take_stale(self) -> list[tuple[int, int]]:
        """Runs of free units, (first, count), whose memory is still committed: to be decommitted."""
        runs = list(_runs(self._stale))
        self._stale = self._aged = 0
        return runs

    def take_aged(self) -> list[tuple[int, int]]:
        """Likewise those only that nobody has leased since the last call of this."""
        runs = list(_runs(self._aged))
        self._stale &= ~self._aged
        self._aged = self._stale
        return runs

    @property
    def has_stale(self) -> bool:
        """Whether memory is committed that nobody leases."""
        return bool(self._stale)

    def check(self) -> None:
        """Raise AssertionError unless every unit is in exactly one block, and no two free halves lie side by side."""
        blocks = [(offset, block.order) for offset, block in self._leased.items()]
        for order, bitmap in enumerate(self._free):
            halves = bitmap & bitmap >> 1 & ((1 << 2 * bitmap.bit_length()) - 1) // 3
            assert not halves, f"free halves of order {order} have not joined"
            for first, count in _runs(bitmap):
                blocks += [(index << order, order) for index in range(first, first + count)]
        end = 0
        for offset, order in sorted(blocks):
            assert offset % (1 << order) == 0, f"the block at unit {offset} begins at no multiple of its size"
            assert offset == end, f"unit {min(offset, end)} is in no block or in two"
            end += 1 << order
        assert end == self.units, "a unit is in no block"
        assert not self._aged & ~self._stale, "a unit has aged that isn't stale"
        leased = sorted(self._leased)
        for first, count in _runs(self._stale):
            before = bisect_left(leased, first + count) - 1
            ends = leased[before] + (1 << self._leased[leased[before]].order) if before >= 0 else 0
            assert ends <= first, "a leased unit would be decommitted"


def _mask(offset: int, order: int) -> int:
    return ((1 << (1 << order)) - 1) << offset


def _runs(bitmap: int) -> Iterator[tuple[int, int]]:
    """Runs of set bits: (first, count)."""
    offset = 0
    while bitmap:
        zeros = (bitmap & -bitmap).bit_length() - 1
        bitmap >>= zeros
        ones = (~bitmap & bitmap + 1).bit_length() - 1
        bitmap >>= ones
        offset += zeros
        yield offset, ones
        offset += ones
