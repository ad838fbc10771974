"""Every storage moves whole pages, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.fake import FakeStorage
from engine.memory import Buddy, Extents, Move, Page, PagePool
from engine.memory.arena import Arena
from engine.memory.storage import HostStorage, KVStorage
from engine.torch_storage import TorchStorage
from kernels.kv import UNIT_BYTES, KVLayout
from kernels.reference import ReferenceKernels

LAYOUT = KVLayout(layers=5, kv_heads=3, head_size=64, element_bytes=2, page_size=80)
"""Pages of 300 KiB, 13 to an extent of 4 MiB with something left over."""
UNITS = 3
PAGES = 3 * 13
CPU = torch.device("cpu")
Write = Callable[[int, int], None]
Read = Callable[[int], int]


def _bytes(storage: Any, array: Any) -> tuple[KVStorage, Write, Read]:
    def page(number: int) -> Any:
        begin = LAYOUT.offset_bytes(number)
        return array[begin : begin + LAYOUT.page_bytes]

    def write(number: int, value: int) -> None:
        page(number)[:] = value

    def read(number: int) -> int:
        low, high = int(page(number).min()), int(page(number).max())
        assert low == high, f"page {number} is torn"
        return low

    return storage, write, read


def _host() -> tuple[KVStorage, Write, Read]:
    arena = Arena(UNITS)
    return _bytes(HostStorage(arena, LAYOUT), arena.bytes)


def _torch() -> tuple[KVStorage, Write, Read]:
    storage = TorchStorage(ReferenceKernels(CPU), LAYOUT, UNITS, UNITS, CPU)
    return _bytes(storage, storage.bytes)


def _fake() -> tuple[KVStorage, Write, Read]:
    storage = FakeStorage(LAYOUT, UNITS)

    def write(page: int, value: int) -> None:
        storage.write([value] * LAYOUT.page_size, range(page * LAYOUT.page_size, (page + 1) * LAYOUT.page_size))

    def read(page: int) -> int:
        [value] = {*storage.read([page], LAYOUT.page_size)} or {0}
        return value

    return storage, write, read


@pytest.fixture(params=[_host, _torch, _fake])
def stored(request: pytest.FixtureRequest) -> tuple[KVStorage, Write, Read]:
    result: tuple[KVStorage, Write, Read] = request.param()
    assert (result[0].layout, result[0].units) == (LAYOUT, UNITS)
    for page in range(PAGES):
        result[1](page, page + 1)
    return result


def test_copies(stored: tuple[KVStorage, Write, Read]) -> None:
    storage, _, read = stored
    storage.copy_pages([Move(1, 30), Move(14, 0)])
    storage.copy_pages([])
    expected = {30: 2, 0: 15}
    assert [read(page) for page in range(PAGES)] == [expected.get(page, page + 1) for page in range(PAGES)]


def test_saved_pages_come_back_anywhere_whatever_happened_since(stored: tuple[KVStorage, Write, Read]) -> None:
    storage, write, read = stored
    saved = storage.save_pages([12, 13, 38])
    for page in (12, 13, 38):
        write(page, 99)
    storage.load_pages(saved, [2, 38, 26])
    expected = {12: 99, 13: 99, 2: 13, 38: 14, 26: 39}
    assert [read(page) for page in range(PAGES)] == [expected.get(page, page + 1) for page in range(PAGES)]


def test_decommitted_units_lose_their_pages_and_the_others_keep_theirs(stored: tuple[KVStorage, Write, Read]) -> None:
    storage, _, read = stored
    storage.decommit([(1, 1)])
    assert [read(page) for page in range(PAGES)] == [0 if 13 <= page < 26 else page + 1 for page in range(PAGES)]


def test_compaction_carries_every_page_along(stored: tuple[KVStorage, Write, Read]) -> None:
    storage, write, read = stored
    pool = PagePool(PAGES, LAYOUT.page_size, Extents(Buddy(UNITS), LAYOUT.extent_order, LAYOUT.pages_per_extent))
    rng = random.Random(3)
    values: dict[Page, int] = {}
    for turn in range(200):
        if rng.random() < 0.6 and pool.available:
            [page] = pool.allocate(1)
            values[page] = turn
            write(page.id, turn)
        elif values:
            page = rng.choice(list(values))
            del values[page]
            pool.release([page])
        if rng.random() < 0.3:
            storage.copy_pages(pool.compact(rng.randint(1, 8)))
            storage.decommit(pool.extents.buddy.take_stale())
        pool.check(list(values))
        assert {page: read(page.id) for page in values} == values


def test_pages_do_not_reach_into_the_next_extent() -> None:
    assert LAYOUT.pages_per_extent == 13
    assert LAYOUT.offset_bytes(13) == UNIT_BYTES
    assert LAYOUT.offset_bytes(12) + LAYOUT.page_bytes <= UNIT_BYTES
