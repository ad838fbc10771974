from __future__ import annotations

import random

import pytest

from engine.memory import Buddy, OutOfUnits


def test_a_hundred_thousand_random_operations_lose_and_overlap_nothing() -> None:
    rng = random.Random(1)
    buddy = Buddy(93)
    blocks: dict[int, int] = {}
    committed: set[int] = set()
    for _ in range(100_000):
        if rng.random() < 0.5:
            order = rng.choice((0, 0, 0, 1, 1, 2, 3, 5))
            room = buddy.room(order)
            try:
                offset = buddy.allocate(order, rng.choice(("kv", "lora", "swap", "scratch")))
            except OutOfUnits:
                assert room == 0
            else:
                assert room > 0
                blocks[offset] = order
                committed |= set(range(offset, offset + (1 << order)))
        elif blocks:
            offset = rng.choice(list(blocks))
            del blocks[offset]
            buddy.free(offset)
        if rng.random() < 0.01:
            runs = buddy.take_stale()
            stale = {unit for first, count in runs for unit in range(first, first + count)}
            leased = {unit for offset, order in blocks.items() for unit in range(offset, offset + (1 << order))}
            assert stale == committed - leased
            committed = leased
        buddy.check()
    for offset in blocks:
        buddy.free(offset)
    buddy.check()
    assert [buddy.room(order) for order in range(8)] == [93, 46, 23, 11, 5, 2, 1, 0]


def test_the_smallest_and_lowest_block_that_fits_is_taken() -> None:
    buddy = Buddy(16)
    assert [buddy.allocate(order, "kv") for order in (0, 2, 0, 1, 3)] == [0, 4, 1, 2, 8]
    with pytest.raises(OutOfUnits, match="no block of 1 units is free for lora"):
        buddy.allocate(0, "lora")


def test_free_halves_join() -> None:
    buddy = Buddy(4)
    units = [buddy.allocate(0, "kv") for _ in range(4)]
    for unit in (1, 3, 0):
        buddy.free(unit)
        assert buddy.room(2) == 0
    assert buddy.room(1) == 1
    buddy.free(units[2])
    assert buddy.room(2) == 1


def test_blocks_are_listed_by_owner() -> None:
    buddy = Buddy(8)
    buddy.allocate(0, "kv")
    buddy.allocate(1, "lora")
    assert (buddy.leased("kv"), buddy.leased("lora"), buddy.leased("swap")) == ({0: 0}, {2: 1}, {})


def test_what_is_not_leased_cannot_be_freed() -> None:
    buddy = Buddy(4)
    buddy.allocate(1, "kv")
    for offset in (1, 2):
        with pytest.raises(ValueError, match="no leased block begins"):
            buddy.free(offset)


def test_check_sees_a_block_that_is_free_and_leased_and_one_that_is_neither() -> None:
    buddy = Buddy(8)
    buddy.allocate(1, "kv")
    buddy._free[0] = 1
    with pytest.raises(AssertionError, match="in no block or in two"):
        buddy.check()
    buddy._free[0] = buddy._free[1] = 0
    with pytest.raises(AssertionError, match="in no block or in two"):
        buddy.check()


def test_a_unit_ages_only_while_nobody_leases_it() -> None:
    buddy = Buddy(4)
    first, second = buddy.allocate(0, "kv"), buddy.allocate(0, "kv")
    buddy.free(first)
    buddy.free(second)
    assert buddy.take_aged() == []
    assert buddy.allocate(0, "kv") == first
    buddy.free(first)
    assert buddy.take_aged() == [(second, 1)]
    buddy.check()
    assert buddy.take_aged() == [(first, 1)]
    assert not buddy.has_stale


def test_check_sees_a_leased_unit_that_would_be_decommitted() -> None:
    buddy = Buddy(8)
    buddy.allocate(0, "kv")
    buddy._stale = 0b11
    with pytest.raises(AssertionError, match="decommitted"):
        buddy.check()


@pytest.mark.parametrize("units", [0, -1])
def test_no_units_are_refused(units: int) -> None:
    with pytest.raises(ValueError, match="at least one unit"):
        Buddy(units)
