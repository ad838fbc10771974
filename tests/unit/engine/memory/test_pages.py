from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.memory import Buddy, Extents, Move, OutOfPages, Page, PagePool, page_hash, root_hash

ROOT = root_hash("test")
PAGE_SIZE = 2


class PoolMachine(RuleBasedStateMachine):
    """Requests over a small alphabet share, extend, release, move and lose pages; contents are followed by place."""

    @initialize(pages=st.integers(1, 40), places=st.integers(1, 6), order=st.integers(0, 2), spare=st.integers(0, 9))
    def start(self, pages: int, places: int, order: int, spare: int) -> None:
        units = (-(-pages // places) << order) + spare
        self.pool = PagePool(pages, PAGE_SIZE, Extents(Buddy(units), order, places))
        self.requests: list[tuple[list[int], list[Page]]] = []
        self.contents: dict[int, tuple[int, ...]] = {}
        """By place: every token up to the end of its page."""
        self.blocks: list[int] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16), publish=st.booleans())
    def admit(self, tokens: list[int], publish: bool) -> None:
        hashes = self.hashes(tokens)
        pages = self.pool.match(hashes)
        for at, page in enumerate(pages):
            assert self.contents[page.id] == tuple(tokens[: (at + 1) * PAGE_SIZE]), "found something else"
        wanted = self.pool.pages_for(len(tokens)) - len(pages)
        if wanted > self.pool.available:
            with pytest.raises(OutOfPages):
                self.pool.allocate(wanted)
            self.pool.release(pages)
            return
        found = len(pages)
        pages += self.pool.allocate(wanted)
        for at, page in enumerate(pages[found:], found):
            self.contents[page.id] = tuple(tokens[: (at + 1) * PAGE_SIZE])
            if publish and at < len(hashes):
                self.pool.publish(page, hashes[at])
        self.requests.append((tokens, pages))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        tokens, pages = self.requests[data.draw(st.integers(0, len(self.requests) - 1))]
        self.pool.hold(pages)
        self.requests.append((tokens, list(pages)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, pages = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.pool.release(pages)

    @rule(most=st.integers(0, 12))
    def compact(self, most: int) -> None:
        before = self.pool.extents.leased
        moves = self.pool.compact(most)
        assert len(moves) <= most
        self.carry_out(moves)
        if len(moves) < most:
            assert self.pool.extents.leased == -(-self.pool.extents.occupied // self.pool.extents.pages_per_extent)
        assert self.pool.extents.leased <= before

    @rule(total=st.integers(1, 50))
    def resize(self, total: int) -> None:
        pool = self.pool
        if pool.held <= total <= pool.extents.ids:
            shrinks = total < pool.total
            self.carry_out(pool.resize(total))
            assert not shrinks or pool.extents.leased == -(-pool.extents.occupied // pool.extents.pages_per_extent)
        else:
            with pytest.raises(ValueError, match="pages"):
                pool.resize(total)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        assert self.pool.cached == 0
        assert all(not self.pool.match(self.hashes(tokens)) for tokens, _ in self.requests)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=16))
    def unpublish(self, tokens: list[int]) -> None:
        for known in self.hashes(tokens):
            self.pool.unpublish(known)
        assert not self.pool.match(self.hashes(tokens))

    @rule(order=st.integers(0, 2))
    def lease_to_another(self, order: int) -> None:
        if self.pool.extents.buddy.room(order):
            self.blocks.append(self.pool.extents.buddy.allocate(order, "lora"))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def other_gives_back(self, data: st.DataObject) -> None:
        self.pool.extents.buddy.free(self.blocks.pop(data.draw(st.integers(0, len(self.blocks) - 1))))

    @invariant()
    def whole(self) -> None:
        self.pool.check(page for _, pages in self.requests for page in pages)
        for tokens, pages in self.requests:
            for at, page in enumerate(pages):
                assert self.contents[page.id] == tuple(tokens[: (at + 1) * PAGE_SIZE]), "a page was overwritten"

    def teardown(self) -> None:
        for _, pages in self.requests:
            self.pool.release(pages)
        for block in self.blocks:
            self.pool.extents.buddy.free(block)
        self.pool.check([])
        assert self.pool.available == self.pool.total
        self.pool.forget()
        self.pool.check([])
        assert self.pool.extents.leased == 0

    def carry_out(self, moves: list[Move]) -> None:
        assert not {move.source for move in moves} & {move.target for move in moves}
        self.contents |= {move.target: self.contents[move.source] for move in moves}

    def hashes(self, tokens: list[int]) -> list[bytes]:
        hashes, parent = [], ROOT
        for at in range(len(tokens) // PAGE_SIZE):
            parent = page_hash(parent, tokens[at * PAGE_SIZE : (at + 1) * PAGE_SIZE])
            hashes.append(parent)
        return hashes


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_page_totals_hold_under_a_hundred_thousand_random_operations() -> None:
    """Each page has one place of its own, whatever is shared, evicted, moved or resized in between."""
    rng = random.Random(11)
    pool = PagePool(24, PAGE_SIZE, Extents(Buddy(9), 0, 4))
    requests: list[list[Page]] = []
    contents: dict[int, Page] = {}
    for turn in range(100_000):
        choice = rng.random()
        if choice < 0.45:
            length = rng.randint(1, 6)
            pages = pool.match(chain(length, rng.randint(0, 5)))
            found = len(pages)
            if length - found <= pool.available:
                pages += pool.allocate(length - found)
                contents |= {page.id: page for page in pages[found:]}
                if rng.random() < 0.7:
                    for page, known in zip(pages, chain(length, rng.randint(0, 5)), strict=True):
                        if page.hash is None:
                            pool.publish(page, known)
                requests.append(pages)
            else:
                pool.release(pages)
        elif choice < 0.9 and requests:
            pool.release(requests.pop(rng.randrange(len(requests))))
        elif choice < 0.98:
            contents |= {move.target: contents[move.source] for move in pool.compact(rng.randint(1, 5))}
        elif pool.held <= (total := rng.randint(8, 36)):
            contents |= {move.target: contents[move.source] for move in pool.resize(total)}
        held = [page for pages in requests for page in pages]
        pool.check(held)
        assert (pool.held, pool.available) == (len(set(held)), pool.total - len(set(held))), f"turn {turn}"
        assert all(contents[page.id] is page for pages in requests for page in pages), f"turn {turn}"
    for pages in requests:
        pool.release(pages)
    pool.forget()
    pool.check([])
    assert (pool.available, pool.extents.leased) == (pool.total, 0)
    assert pool.evictions > 1000


@cache
def chain(n: int, kind: int = 0) -> list[bytes]:
    hashes, parent = [], page_hash(ROOT, [kind])
    for at in range(n):
        parent = page_hash(parent, [at, at])
        hashes.append(parent)
    return hashes


def published(pool: PagePool, hashes: list[bytes]) -> list[Page]:
    pages = pool.allocate(len(hashes))
    for page, known in zip(pages, hashes, strict=True):
        pool.publish(page, known)
    return pages


class TestSharing:
    def test_a_page_is_free_when_its_last_holder_leaves(self) -> None:
        pool = PagePool(2, 4)
        pages = pool.allocate(1)
        pool.hold(pages)
        pool.release(pages)
        assert pool.available == 1
        pool.release(pages)
        assert pool.available == 2

    def test_a_page_that_nobody_holds_can_be_neither_shared_nor_released_nor_published(self) -> None:
        pool = PagePool(4, 4)
        pages = pool.allocate(2)
        pool.release(pages)
        with pytest.raises(ValueError, match="can't be shared"):
            pool.hold(pages)
        with pytest.raises(ValueError, match="already"):
            pool.release(pages)
        with pytest.raises(ValueError, match="can't be published"):
            pool.publish(pages[0], ROOT)

    def test_a_page_is_known_by_one_hash(self) -> None:
        pool = PagePool(4, 4)
        [page] = published(pool, chain(1))
        pool.publish(page, chain(1)[0])
        with pytest.raises(ValueError, match="another hash"):
            pool.publish(page, chain(2)[1])

    def test_the_first_page_wins_and_its_duplicate_stays_private(self) -> None:
        pool = PagePool(4, 4)
        first, second = published(pool, chain(1)), published(pool, chain(1))
        assert pool.match(chain(1)) == first
        assert second[0].hash is None
        pool.release(second)
        assert (pool.cached, pool.available) == (0, 3)


class TestCaching:
    def test_known_pages_outlive_their_request(self) -> None:
        pool = PagePool(8, 4)
        pages = published(pool, chain(3))
        pool.release(pages)
        assert (pool.cached, pool.held, pool.available) == (3, 0, 8)
        assert pool.match([*chain(2), b"unknown", chain(3)[2]]) == pages[:2]
        assert (pool.cached, pool.held, pool.available) == (1, 2, 6)

    def test_a_chain_gives_way_from_its_end(self) -> None:
        pool = PagePool(4, 4)
        pages = published(pool, chain(4))
        pool.release(pages)
        for left in (3, 2, 1, 0):
            pool.allocate(1)
            found = pool.match(chain(4))
            assert found == pages[:left]
            pool.release(found)

    def test_the_chain_used_least_recently_gives_way_first(self) -> None:
        pool = PagePool(4, 4)
        old = published(pool, chain(2))
        new = published(pool, [b"1", b"2"])
        pool.release(old)
        pool.release(new)
        pool.release(pool.match(chain(2)))
        pool.allocate(2)
        assert pool.match([b"1"]) == []
        assert pool.match(chain(2)) == old

    def test_new_pages_take_free_places_before_cached_ones(self) -> None:
        pool = PagePool(4, 4)
        pool.release(published(pool, chain(2)))
        pool.allocate(2)
        assert (pool.cached, pool.evictions) == (2, 0)
        pool.allocate(2)
        assert (pool.cached, pool.evictions) == (0, 2)

    def test_cached_pages_give_way_when_others_have_the_arena(self) -> None:
        buddy = Buddy(4)
        pool = PagePool(8, 4, Extents(buddy, 0, 2))
        pool.release(published(pool, chain(2)))
        for _ in range(3):
            buddy.allocate(0, "lora")
        assert pool.available == 2
        pool.allocate(2)
        assert (pool.available, pool.evictions) == (0, 2)
        with pytest.raises(OutOfPages, match="1 pages wanted, 0 of 8 available"):
            pool.allocate(1)


class TestResizing:
    def test_a_smaller_pool_keeps_what_is_held_and_what_was_used_last(self) -> None:
        pool = PagePool(16, 4, Extents(Buddy(4), 0, 4))
        held = pool.allocate(3)
        old, new = published(pool, chain(4)), published(pool, [b"1", b"2"])
        pool.release(old)
        pool.release(new)
        pool.resize(6)
        assert (pool.held, pool.cached, pool.extents.leased) == (3, 3, 2)
        assert pool.match([b"1", b"2"]) == new
        assert pool.match(chain(4)) == old[:1]
        pool.check([*held, *new, old[0]])

    def test_it_grows_as_far_as_there_are_addresses(self) -> None:
        pool = PagePool(4, 4, Extents(Buddy(4), 0, 4))
        pages = pool.allocate(4)
        assert pool.resize(16) == []
        pool.release(pool.allocate(12))
        with pytest.raises(ValueError, match="addresses for 16 pages, not for 17"):
            pool.resize(17)
        with pytest.raises(ValueError, match="4 pages are held, the pool can't have 3"):
            pool.resize(3)
        pool.release(pages)
        with pytest.raises(ValueError, match="can't have 0"):
            pool.resize(0)


class TestPlaces:
    def test_pages_go_to_the_fullest_extent_so_that_others_empty(self) -> None:
        pool = PagePool(12, 4, Extents(Buddy(3), 0, 4))
        pages = pool.allocate(12)
        pool.release([*pages[1:4], pages[5]])
        [page] = pool.allocate(1)
        assert page.id // 4 == pages[4].id // 4
        pool.release(pages[:1])
        assert pool.extents.leased == 2

    def test_fragmentation_is_the_free_share_of_the_leased_extents(self) -> None:
        pool = PagePool(12, 4, Extents(Buddy(3), 0, 4))
        assert pool.fragmentation == 0
        pages = pool.allocate(8)
        pool.release(pages[2:8:2])
        assert pool.fragmentation == 3 / 8

    def test_compaction_empties_the_emptiest_extents_a_bounded_amount_at_a_time(self) -> None:
        pool = PagePool(12, 4, Extents(Buddy(3), 0, 4))
        pages = pool.allocate(12)
        pool.release([*pages[0:2], *pages[5:8], pages[8]])
        staying = [*pages[2:5], *pages[9:12]]
        assert [len(pool.compact(1)) for _ in range(4)] == [1, 0, 0, 0]
        pool.check(staying)
        assert pool.extents.leased == 2
        assert len({page.id for page in staying}) == 6

    def test_what_no_extent_can_be_emptied_by_is_not_moved(self) -> None:
        pool = PagePool(8, 4, Extents(Buddy(2), 0, 4))
        pages = pool.allocate(8)
        pool.release([pages[0], pages[4]])
        assert pool.compact(100) == []


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for_a_number_of_tokens(tokens: int, pages: int) -> None:
    assert PagePool(1, 16).pages_for(tokens) == pages


@pytest.mark.parametrize(("total", "page_size"), [(0, 16), (16, 0)])
def test_an_empty_pool_is_refused(total: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PagePool(total, page_size)


def test_check_finds_a_page_whose_holders_differ() -> None:
    pool = PagePool(4, 4)
    pages = pool.allocate(2)
    pool.check(pages)
    for wrong in (pages[:1], [*pages, pages[0]], []):
        with pytest.raises(AssertionError, match="holders"):
            pool.check(wrong)
