from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.memory import OutOfPages, PagePool


class Pool(RuleBasedStateMachine):
    """Holders that allocate, share and free in any order, against a list of what each holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12, 4)
        self.holders: list[list[int]] = []

    @rule(n=st.integers(0, 14))
    def allocate(self, n: int) -> None:
        free = self.pool.free_pages
        if n > free:
            with pytest.raises(OutOfPages):
                self.pool.allocate(n)
            assert self.pool.free_pages == free
            return
        pages = self.pool.allocate(n)
        assert len(set(pages)) == n
        assert not set(pages) & {page for holder in self.holders for page in holder}
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.holders))
        self.pool.share(pages)
        self.holders.append(list(pages))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.free(self.holders.pop(index))

    @invariant()
    def adds_up(self) -> None:
        held = [page for holder in self.holders for page in holder]
        self.pool.check(held)
        assert self.pool.free_pages == 12 - len(set(held))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_page_is_not_freed_twice() -> None:
    pool = PagePool(2, 4)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(ValueError, match="free already"):
        pool.free(pages)


def test_a_free_page_is_not_shared() -> None:
    with pytest.raises(ValueError, match="is free"):
        PagePool(2, 4).share([1])


def test_check_sees_a_page_that_its_holder_forgot() -> None:
    pool = PagePool(4, 4)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="holders and counts differ"):
        pool.check(pages[:1])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_pages_for_tokens(tokens: int, pages: int) -> None:
    assert PagePool(1, 16).pages_for(tokens) == pages


@pytest.mark.parametrize(("total", "page_size"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused(total: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PagePool(total, page_size)
