"""What each step computes. One rule: a request whose computed tokens are fewer than its known ones gets more.

Prefill, chunked prefill, decode and the return after a preemption are the same thing with different
numbers left. No torch here.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from typing import NamedTuple

from engine.config import EngineConfig
from engine.fairness import FairShare
from engine.memory import Page, PagePool
from engine.memory.swap import SwapSpace
from engine.preemption import Preemption
from engine.sequence import TokenSequence
from engine.sharing import PrefixSharing
from engine.token_budget import TokenBudget, share
from engine.waiting import WaitingQueue


class Chunk(NamedTuple):
    """Tokens `start : end` of a sequence, to be computed in this step."""

    sequence: TokenSequence
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """Whether the step brings a new token: the chunk reaches the last one known, and one more may come."""
        return self.end == len(self.sequence.tokens) < self.sequence.max_len


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's work. Every chunk has its pages; whoever was preempted has given them back."""

    chunks: tuple[Chunk, ...]
    admitted: tuple[TokenSequence, ...]
    preempted: tuple[TokenSequence, ...]


class Scheduler:
    """Who runs, who waits, and who has to make way.

    Requests run in order of rank (class, arrival). One is admitted when pages for all its known tokens
    are free, and one more for each request that runs already; strictly in the order of the queue, so
    that a large one is not overtaken for ever. Only a request that is more urgent than one that runs
    may go before its turn: it takes the place of that one. When a running request needs a page and
    none is free, the last in rank gives its pages back and waits at the front of its class. The first
    in rank never has to, and alone it fits, so every step brings it closer to its end.
    """

    def __init__(self, pool: PagePool, config: EngineConfig, swap: SwapSpace | None = None) -> None:
        self.pool = pool
        self.max_num_seqs = config.max_num_seqs
        self.budget = TokenBudget(config.max_num_batched_tokens, config.prefill_share)
        self.running: list[TokenSequence] = []
        self.shares = FairShare(config.tenant_weights)
        self.waiting = WaitingQueue(self.shares, config.aging_s)
        self.sharing = PrefixSharing(pool)
        self.preemption = Preemption(pool, swap)
        self._window_s = config.batch_window_ms / 1000

    def fits(self, sequence: TokenSequence) -> bool:
        """Whether the sequence could run to its end if it had the pool for itself."""
        return self.pool.pages_for(sequence.kv_tokens) <= self.pool.total

    def add(self, sequence: TokenSequence, now_s: float) -> None:
        """Let a sequence wait for its turn."""
        if not self.fits(sequence):
            raise ValueError(
                f"request {sequence.id} may need {sequence.kv_tokens} tokens of KV memory,"
                f" and there is room for {self.pool.capacity_tokens}"
            )
        self.waiting.push(sequence, now_s)

    def remove(self, sequence: TokenSequence) -> None:
        """Forget a sequence, running or waiting, and free its pages."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self.preemption.discard(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)

    def plan(self, now_s: float) -> Plan:
        """Choose the next step's chunks."""
        preempted: list[TokenSequence] = []
        admitted = self._admit(now_s, preempted) if self.waiting else []
        budget = self.budget.tokens
        chunks: list[Chunk] = []
        longer: list[TokenSequence] = []
        page_size = self.pool.page_size
        for sequence in tuple(self.running):
            pages, known, computed = len(sequence.pages), len(sequence.tokens), sequence.computed
            if not pages:
                continue  # preempted by one before it
            if known - computed > 1:
                longer.append(sequence)
            elif budget and (known <= pages * page_size or self._grow(sequence, now_s, preempted)):
                chunks.append(Chunk(sequence, computed, known))
                budget -= 1
        if longer:
            chunks += self._prefill(longer, self.budget.prompts(len(chunks)))
        return Plan(tuple(chunks), tuple(admitted), tuple(preempted))

    def commit(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Note that the KV of these chunks' tokens is written; which of them bring a new token, before it is known."""
        page_size = self.pool.page_size
        samples = [chunk.samples for chunk in chunks]
        given: dict[str, int] = {}
        for (sequence, _, end), brings_token in zip(chunks, samples, strict=True):
            sequence.computed = end
            if end // page_size > sequence.shared_pages and sequence.root is not None:
                self.sharing.publish(sequence)
            if brings_token:
                given[sequence.tenant] = given.get(sequence.tenant, 0) + 1
        for tenant, tokens in given.items():
            self.shares.charge(tenant, tokens)
        return samples

    # -- admission -----------------------------------------------------------------------------

    def _admit(self, now_s: float, preempted: list[TokenSequence]) -> list[TokenSequence]:
        """Admit in the order of the queue while there is room, then whoever may take the place of another."""
        admitted: list[TokenSequence] = []
        if self.max_num_seqs < 1 or self._waits_for_companions(now_s):
            return admitted
        if len(self.running) < self.max_num_seqs:
            self._admit_in_order(now_s, admitted)
        self._admit_urgent(now_s, admitted, preempted)
        return admitted

    def _admit_in_order(self, now_s: float, admitted: list[TokenSequence]) -> None:
        decoding = sum(sequence.remaining == 1 for sequence in self.running)
        least = self.budget.least(decoding)
        budget = self.budget.prompts(decoding)
        for sequence in self.running:
            budget -= min(sequence.remaining, share(budget)) if sequence.remaining > 1 else 0
        passed = 0
        for sequence in self.waiting.in_order(now_s):
            if len(self.running) >= self.max_num_seqs or budget < least or passed > self.max_num_seqs:
                return
            matched = self.sharing.match(sequence)
            if self.sharing.comes(sequence, len(matched), self.waiting.level(sequence, now_s)):
                self.pool.release(matched)
                passed += 1
            elif self.pool.available >= self._pages_wanted(sequence) - len(matched) + self._kept():
                self._begin(sequence, matched, now_s, admitted)
                budget -= min(sequence.remaining, share(budget))
            else:
                self.pool.release(matched)
                return

    def _admit_urgent(self, now_s: float, admitted: list[TokenSequence], preempted: list[TokenSequence]) -> None:
        """Admit requests in the place of running ones of a lower class, the most urgent first."""
        while self.running:
            urgent = self.waiting.most_urgent
            if urgent is None or urgent >= self.running[-1].level:
                return
            sequence = next(self.waiting.in_order(now_s, urgent))
            matched = self.sharing.match(sequence)
            victims = self._victims(sequence, self._pages_wanted(sequence) - len(matched))
            if victims is None or not self._gets_a_share(sequence):
                self.pool.release(matched)
                return
            for victim in victims:
                self._preempt(victim, now_s, preempted)
            self._begin(sequence, matched, now_s, admitted)

    def _victims(self, sequence: TokenSequence, pages: int) -> list[TokenSequence] | None:
        """Who has to be preempted so that the sequence gets so many pages; None if even that is not enough.

        Only requests of a class below its priority make way: what it gained by waiting takes nobody's place.
        """
        free = self.pool.available
        staying = len(self.running)
        victims: list[TokenSequence] = []
        given: Counter[Page] = Counter()
        while not ((victims or staying < self.max_num_seqs) and free >= pages + staying):
            if not staying or self.running[staying - 1].level <= sequence.priority:
                return None
            staying -= 1
            victims.append(self.running[staying])
            given.update(self.running[staying].pages)
            free = self.pool.available + sum(page.refs == holders for page, holders in given.items())
        return victims

    def _begin(self, sequence: TokenSequence, matched: list[Page], now_s: float, admitted: list[TokenSequence]) -> None:
        """Let a waiting sequence run, with the pages that were found for it."""
        sequence.level = self.waiting.level(sequence, now_s)
        self.waiting.remove(sequence)
        sequence.pages = matched + self.pool.allocate(self._pages_wanted(sequence) - len(matched))
        sequence.computed = self.preemption.restore(sequence, sequence.pages, len(matched))
        self.sharing.begin(sequence, len(matched))
        if not sequence.preemptions:
            sequence.cached_tokens = sequence.computed
            self.shares.begin(sequence.tenant, sequence.remaining)
        insort(self.running, sequence, key=attrgetter("rank"))
        admitted.append(sequence)

    def _waits_for_companions(self, now_s: float) -> bool:
        """Whether the window is open in which new requests gather.

        It ends when the first of them has waited long enough, when as many wait as there are slots, or
        when their prompts fill the next step anyway. Nobody is waited for if nobody decodes, if
        another prompt is being computed, or if somebody returns.
        """
        waiting = self.waiting
        if not self._window_s or not self.running or waiting.returning:
            return False
        if now_s - waiting.oldest_s >= self._window_s or len(waiting) >= self.max_num_seqs - len(self.running):
            return False
        if any(sequence.remaining > 1 for sequence in self.running):
            return False
        return sum(sequence.remaining for sequence in waiting) < self.budget.prompts(len(self.running))

    def _kept(self) -> int:
        """Pages that admission in order leaves to those who run: one for each, or the watermark if that is more."""
        return max(len(self.running), self.pool.watermark_pages) if self.running else 0

    def _pages_wanted(self, sequence: TokenSequence) -> int:
        return self.pool.pages_for(len(sequence.tokens))

    # -- the token budget ----------------------------------------------------------------------

    def _gets_a_share(self, sequence: TokenSequence) -> bool:
        """Whether those before the sequence in rank leave it a share of the next step."""
        staying = [*takewhile(lambda s: s.level <= sequence.priority, self.running)]
        decoding = sum(s.remaining == 1 for s in staying)
        budget = self.budget.prompts(decoding)
        for other in staying:
            budget -= min(other.remaining, share(budget)) if other.remaining > 1 else 0
        return budget >= self.budget.least(decoding)

    def _prefill(self, sequences: list[TokenSequence], budget: int) -> list[Chunk]:
        """Divide the budget in order of rank; one sequence takes at most half of it if the others can use the rest."""
        chunks = []
        wanted = sum(sequence.remaining for sequence in sequences)
        for sequence in sequences:
            if not budget:
                break
            wanted -= sequence.remaining
            count = min(sequence.remaining, budget - min(wanted, budget // 2))
            chunks.append(Chunk(sequence, sequence.computed, sequence.computed + count))
            budget -= count
        return chunks

    # -- making way ----------------------------------------------------------------------------

    def _grow(self, sequence: TokenSequence, now_s: float, preempted: list[TokenSequence]) -> bool:
        """Give a decoding sequence the page that its next token goes to, at the cost of the last in rank."""
        while not self.pool.available:
            victim = self.running[-1]
            if victim is sequence:
                return False
            self._preempt(victim, now_s, preempted)
        sequence.pages += self.pool.allocate(1)
        return True

    def make_room(self, pages: int, now_s: float) -> list[TokenSequence]:
        """Preempt the last in rank until at most so many pages are held."""
        preempted: list[TokenSequence] = []
        while self.pool.held > pages:
            self._preempt(self.running[-1], now_s, preempted)
        return preempted

    def _preempt(self, sequence: TokenSequence, now_s: float, preempted: list[TokenSequence]) -> None:
        self.preemption.save(sequence)
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        self.waiting.push_front(sequence, now_s)
        preempted.append(sequence)

    def _release(self, sequence: TokenSequence) -> None:
        self.sharing.end(sequence)
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.computed = 0

    def check(self) -> None:
        """Raise AssertionError if queues, pages and counts don't agree."""
        self.pool.check(page for sequence in self.running for page in sequence.pages)
        self.waiting.check()
        self.sharing.check(self.running)
        self.preemption.check(list(self.waiting))
        ranks = [sequence.rank for sequence in self.running]
        assert ranks == sorted(set(ranks)), "running requests are out of order"
        for sequence in self.running:
            assert 0 <= sequence.computed < len(sequence.tokens) <= sequence.max_len, f"{sequence.id}: counts"
            assert self.pool.pages_for(sequence.computed) <= len(sequence.pages), f"{sequence.id}: computed without KV"
            assert sequence not in self.waiting, f"{sequence.id} runs and waits"
