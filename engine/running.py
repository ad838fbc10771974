"""The sequences that run, and their pages: who holds which, who comes and who has to go. No torch here."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import attrgetter

from engine.compression import KVCompression
from engine.memory import Page, PagePool
from engine.memory.swap import SwapSpace
from engine.preemption import Preemption
from engine.sequence import GONE, TokenSequence
from engine.sharing import PrefixSharing
from engine.waiting import WaitingQueue
from kernels.kv import Thinning


class Running:
    """In order of rank. Whoever begins comes from the queue, and whoever makes way goes back there."""

    def __init__(
        self,
        pool: PagePool,
        waiting: WaitingQueue,
        swap: SwapSpace | None = None,
        compression: KVCompression = KVCompression(),  # noqa: B008
    ) -> None:
        self.pool = pool
        self.compression = compression
        self.sharing = PrefixSharing(pool)
        self.preemption = Preemption(pool, swap)
        self._waiting = waiting
        self._sequences: list[TokenSequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self._sequences)

    def __getitem__(self, index: int) -> TokenSequence:
        return self._sequences[index]

    def pages_to_begin(self, sequence: TokenSequence, matched: int) -> int:
        """New pages that a waiting sequence needs for all its known tokens, when so many were found."""
        return self.pool.pages_for(self.compression.most_slots(len(sequence.tokens))) - matched

    def begin(self, sequence: TokenSequence, matched: list[Page], now_s: float) -> None:
        """Let a waiting sequence run, with the pages that were found for it."""
        sequence.level = self._waiting.level(sequence, now_s)
        self._waiting.remove(sequence)
        sequence.pages = matched + self.pool.allocate(self.pages_to_begin(sequence, len(matched)))
        sequence.computed = self.preemption.restore(sequence, sequence.pages, len(matched))
        self.sharing.begin(sequence, len(matched))
        insort(self._sequences, sequence, key=attrgetter("rank"))

    def end(self, sequence: TokenSequence) -> None:
        """It runs no more, and holds no page."""
        self._sequences.remove(sequence)
        self.sharing.end(sequence)
        self.pool.release(sequence.held_pages)
        sequence.pages = []
        sequence.gone_pages = 0
        sequence.computed = sequence.ahead = sequence.coming = sequence.evicted = 0
        sequence.stays += 1

    def give_back(self, sequence: TokenSequence, reach_tokens: int) -> None:
        """Give up the pages of tokens that none of those to come will see: each sees `reach_tokens`, with itself.

        Whoever shares them keeps them, and those that can be found stay until others need the room.
        """
        gone, unseen = sequence.gone_pages, max(0, sequence.computed - reach_tokens + 1) // self.pool.page_size
        if unseen > gone:
            self.pool.release(sequence.pages[gone:unseen])
            sequence.pages[gone:unseen] = [GONE] * (unseen - gone)
            sequence.gone_pages = unseen

    def due(self) -> list[TokenSequence]:
        """Those that have to be thinned before they go on, in order of rank: nothing of theirs is under way."""
        compression = self.compression
        return [s for s in self if not s.ahead and compression.due(s.computed, s.slots)] if compression.thins else []

    def thinning(self, sequence: TokenSequence) -> Thinning:
        """What is to be done to one that is due."""
        pages = [page.id for page in sequence.pages[: self.pool.pages_for(sequence.slots)]]
        return self.compression.thinning(pages, sequence.computed, sequence.slots)

    def thin(self, sequence: TokenSequence) -> None:
        """Note that it was thinned; pages that its known tokens don't need any more are free."""
        compression, known = self.compression, len(sequence.tokens)
        sequence.evicted = sequence.computed - compression.slots(sequence.computed)
        grows = known > compression.next_stop(sequence.computed)
        needed = self.pool.pages_for(compression.most_slots(known) if grows else known - sequence.evicted)
        self.pool.release(sequence.pages[needed:])
        del sequence.pages[needed:]

    def make_way(self, sequence: TokenSequence, now_s: float) -> None:
        """It gives up its pages, copied out if that pays, and waits at the front of its class."""
        self.preemption.save(sequence)
        self.end(sequence)
        sequence.preemptions += 1
        self._waiting.push_front(sequence, now_s)

    def freed_by(self, victims: Iterable[TokenSequence]) -> int:
        """Pages that would be free if all of these made way: those that nobody else holds."""
        given: Counter[Page] = Counter()
        for victim in victims:
            given.update(victim.held_pages)
        return sum(page.refs == holders for page, holders in given.items())

    def check(self) -> None:
        """Raise AssertionError if order, pages and counts don't agree."""
        self.pool.check(page for sequence in self for page in sequence.held_pages)
        self.sharing.check(list(self))
        ranks = [sequence.rank for sequence in self]
        assert ranks == sorted(set(ranks)), "running requests are out of order"
        for sequence in self:
            assert 0 <= sequence.computed < len(sequence.tokens) <= sequence.max_len, f"{sequence.id}: counts"
            assert sequence.ahead >= 0 <= sequence.remaining, f"{sequence.id}: more is under way than is to come"
            launched = self.pool.pages_for(sequence.slots + sequence.ahead)
            assert launched <= len(sequence.pages), f"{sequence.id}: computed without KV"
            assert sequence.slots <= self.compression.most_slots(sequence.computed), f"{sequence.id} keeps too much"
            assert sequence.slots >= self.compression.slots(sequence.computed), f"{sequence.id} keeps too little"
            assert not sequence.evicted or not sequence.shared_pages, f"{sequence.id} is thinned and shared"
            assert sequence.pages[: sequence.gone_pages] == [GONE] * sequence.gone_pages, f"{sequence.id}: gone pages"
            assert GONE not in sequence.held_pages, f"{sequence.id} holds a page that is gone"
            assert sequence not in self._waiting, f"{sequence.id} runs and waits"
