from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu import copy, library
from kernels.cpu.library import Team
from tests.unit.kernels.isas import every_isa


@every_isa()
@pytest.mark.parametrize("page_bytes", [64, 1000, 256 * 1024, 256 * 1024 + 1, 700_000])
def test_pages_are_copied_saved_and_loaded_and_nothing_else_changes(isa: str, page_bytes: int) -> None:
    random = np.random.default_rng(0)
    arena = random.integers(0, 256, 8 * page_bytes + 5, np.uint8)
    source, target = [5 + 3 * page_bytes, 0], [5 + 6 * page_bytes, 5 + page_bytes]
    expected = arena.copy()
    for to, at in zip(target, source, strict=True):
        expected[to : to + page_bytes] = arena[at : at + page_bytes]
    with Team(library.load(isa), 3) as team:
        copy.copy_pages(team, arena, page_bytes, source, target)
        np.testing.assert_array_equal(arena, expected)

        saved = np.empty((2, page_bytes), np.uint8)
        copy.save_pages(team, arena, page_bytes, target, saved)
        for row, to in zip(saved, target, strict=True):
            np.testing.assert_array_equal(row, arena[to : to + page_bytes])
            arena[to : to + page_bytes] = 0
        copy.load_pages(team, saved, arena, page_bytes, target)
        np.testing.assert_array_equal(arena, expected)
        copy.copy_pages(team, arena, page_bytes, [], [])


@every_isa()
def test_pages_that_overlap_or_lie_outside_are_refused(isa: str) -> None:
    arena = np.zeros(4096, np.uint8)
    with Team(library.load(isa), 1) as team:
        with pytest.raises(ValueError, match="none may be written twice"):
            copy.copy_pages(team, arena, 1024, [0, 1024], [1024, 2048])
        with pytest.raises(ValueError, match="no page may be written twice"):
            copy.load_pages(team, np.zeros((2, 1024), np.uint8), arena, 1024, [0, 0])
        with pytest.raises(ValueError, match="outside the arena's 4096 bytes"):
            copy.copy_pages(team, arena, 1024, [0], [3073])
        with pytest.raises(ValueError, match="saved has to have the shape"):
            copy.save_pages(team, arena, 1024, [0], np.zeros((2, 1024), np.uint8))
