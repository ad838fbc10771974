from __future__ import annotations

import numpy as np
import pytest

from engine.memory import Buddy, Extents, Page, PagePool
from engine.memory.arena import Arena
from engine.memory.storage import HostStorage
from engine.memory.swap import SwapSpace
from kernels.kv import KVLayout

LAYOUT = KVLayout(layers=2, kv_heads=1, head_size=8, element_bytes=2, page_size=4)


class Memory:
    """A pool of 12 pages over real memory, with swap space for 5."""

    def __init__(self) -> None:
        self.storage = HostStorage(Arena(1), LAYOUT)
        self.pool = PagePool(12, 4, Extents(Buddy(1), LAYOUT.extent_order, LAYOUT.pages_per_extent))
        self.swap = SwapSpace(self.storage, 5 * LAYOUT.page_bytes + 1)

    def write(self, pages: list[Page], value: int) -> None:
        for page in pages:
            begin = LAYOUT.offset_bytes(page.id)
            self.storage.arena.bytes[begin : begin + LAYOUT.page_bytes] = value

    def read(self, pages: list[Page]) -> list[int]:
        contents = self.storage.save_pages([page.id for page in pages])
        return np.unique(contents, axis=1).flatten().tolist()


def test_a_sequence_comes_back_into_other_pages() -> None:
    memory = Memory()
    pages = memory.pool.allocate(2)
    memory.write(pages[:1], 1)
    memory.write(pages[1:], 2)
    memory.swap.save("a", pages)
    memory.pool.release(pages)
    others = memory.pool.allocate(3)
    memory.write(others, 9)
    back = memory.pool.allocate(2)
    memory.swap.load("a", back)
    assert memory.read(back) == [1, 2]
    assert memory.read(others) == [9, 9, 9]
    assert "a" not in memory.swap
    assert memory.swap.used_bytes == 0
    memory.swap.check()


def test_it_is_bounded() -> None:
    memory = Memory()
    assert memory.swap.most_pages == 5
    memory.swap.save("a", memory.pool.allocate(3))
    assert (memory.swap.fits(2), memory.swap.fits(3)) == (True, False)
    assert memory.swap.used_bytes == 3 * LAYOUT.page_bytes
    with pytest.raises(ValueError, match="3 more pages don't fit: 3 of 5 are in use"):
        memory.swap.save("b", memory.pool.allocate(3))
    memory.swap.check()


def test_what_is_discarded_makes_room() -> None:
    memory = Memory()
    memory.swap.save("a", memory.pool.allocate(5))
    memory.swap.discard("a")
    memory.swap.discard("a")
    memory.swap.save("b", memory.pool.allocate(5))
    assert (len(memory.swap), "a" in memory.swap, memory.swap.pages_of("b")) == (1, False, 5)
    memory.swap.check()


def test_a_sequence_is_saved_once_and_comes_back_whole() -> None:
    memory = Memory()
    pages = memory.pool.allocate(2)
    memory.swap.save("a", pages)
    with pytest.raises(ValueError, match="saved already"):
        memory.swap.save("a", pages)
    with pytest.raises(ValueError, match="2 pages of a are saved, got 1"):
        memory.swap.load("a", pages[:1])
    memory.swap.check()


def test_no_space_holds_nothing() -> None:
    memory = Memory()
    assert not SwapSpace(memory.storage, 0).fits(1)
