"""What each step computes. One rule: a request whose computed tokens are fewer than its known ones gets more.

Prefill, chunked prefill, decode and the return after a preemption are the same thing with different
numbers left. No torch here.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from engine.memory import PagePool
from engine.sequence import TokenSequence
from engine.waiting import WaitingQueue


class Chunk(NamedTuple):
    """Tokens `start : end` of a sequence, to be computed in this step."""

    sequence: TokenSequence
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """Whether the step brings a new token: the chunk reaches the last one known."""
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's work. Every chunk has its pages; whoever was preempted has given them back."""

    chunks: tuple[Chunk, ...]
    admitted: tuple[TokenSequence, ...]
    preempted: tuple[TokenSequence, ...]


class Scheduler:
    """Who runs, who waits, and who has to make way.

    Requests run in order of rank (priority, arrival). A request is admitted when pages for all its
    known tokens are free, and one more for each request that runs already; strictly in order, so
    that a large one is not overtaken for ever. When a running request needs a page and none is free,
    the last in rank gives its pages back and waits at the front of its class. The first in rank never
    has to, and alone it fits, so every step brings it closer to its end.
    """

    def __init__(self, pool: PagePool, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[TokenSequence] = []
        self.waiting = WaitingQueue()

    def fits(self, sequence: TokenSequence) -> bool:
        """Whether the sequence could run to its end if it had the pool for itself."""
        return self.pool.pages_for(sequence.kv_tokens) <= self.pool.total

    def add(self, sequence: TokenSequence) -> None:
        """Let a sequence wait for its turn."""
        if not self.fits(sequence):
            raise ValueError(
                f"request {sequence.id} may need {sequence.kv_tokens} tokens of KV memory,"
                f" and there is room for {self.pool.capacity_tokens}"
            )
        self.waiting.push(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Forget a sequence, running or waiting, and free its pages."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)

    def plan(self) -> Plan:
        """Choose the next step's chunks."""
        preempted: list[TokenSequence] = []
        admitted = self._admit(preempted) if self.waiting else []
        budget = self.max_num_batched_tokens
        chunks: list[Chunk] = []
        longer: list[TokenSequence] = []
        for sequence in tuple(self.running):
            if not sequence.pages:
                continue  # preempted by one before it
            if sequence.remaining > 1:
                longer.append(sequence)
            elif budget and self._grow(sequence, preempted):
                chunks.append(Chunk(sequence, sequence.computed, sequence.computed + 1))
                budget -= 1
        chunks += self._prefill(longer, budget)
        return Plan(tuple(chunks), tuple(admitted), tuple(preempted))

    def _admit(self, preempted: list[TokenSequence]) -> list[TokenSequence]:
        """Admit from the head of the queue while slots, pages and the token budget allow it."""
        admitted = []
        budget = self._budget_left()
        smallest = max(1, self.max_num_batched_tokens // 8)
        while budget >= smallest and (sequence := self.waiting.first()) is not None:
            victims = self._victims(sequence)
            if victims is None:
                break
            for victim in victims:
                self._preempt(victim, preempted)
            self.waiting.remove(sequence)
            sequence.pages = self.pool.allocate(self.pool.pages_for(len(sequence.tokens)))
            insort(self.running, sequence, key=attrgetter("rank"))
            admitted.append(sequence)
            budget = self._budget_left() if victims else budget - min(sequence.remaining, _share(budget))
        return admitted

    def _budget_left(self) -> int:
        """Tokens of the budget that running requests are not going to use, if each long one takes its share."""
        budget = self.max_num_batched_tokens
        for sequence in self.running:
            budget -= min(sequence.remaining, _share(budget))
        return budget

    def _victims(self, sequence: TokenSequence) -> list[TokenSequence] | None:
        """Who has to be preempted so that the sequence can be admitted; None if it has to wait.

        Only requests of lower priority make way, and only if that is enough.
        """
        if self.max_num_seqs < 1:
            return None
        wanted = self.pool.pages_for(len(sequence.tokens))
        free = self.pool.available
        staying = len(self.running)
        victims: list[TokenSequence] = []
        while not ((victims or staying < self.max_num_seqs) and free >= wanted + staying):
            if not staying or self.running[staying - 1].priority <= sequence.priority:
                return None
            staying -= 1
            victims.append(self.running[staying])
            free += len(self.running[staying].pages)
        return victims

    def _grow(self, sequence: TokenSequence, preempted: list[TokenSequence]) -> bool:
        """Give a decoding sequence the page that its next token goes to, at the cost of the last in rank."""
        if len(sequence.tokens) <= len(sequence.pages) * self.pool.page_size:
            return True
        while not self.pool.available:
            victim = self.running[-1]
            if victim is sequence:
                return False
            self._preempt(victim, preempted)
        sequence.pages += self.pool.allocate(1)
        return True

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

    def _preempt(self, sequence: TokenSequence, preempted: list[TokenSequence]) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        self.waiting.push_front(sequence)
        preempted.append(sequence)

    def _release(self, sequence: TokenSequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.computed = 0

    def check(self) -> None:
        """Raise AssertionError if queues, pages and counts don't agree."""
        self.pool.check(page for sequence in self.running for page in sequence.pages)
        ranks = [sequence.rank for sequence in self.running]
        assert ranks == sorted(set(ranks)), "running requests are out of order"
        for sequence in self.running:
            assert 0 <= sequence.computed < len(sequence.tokens) <= sequence.max_len, f"{sequence.id}: counts"
            assert self.pool.pages_for(sequence.computed) <= len(sequence.pages), f"{sequence.id}: computed without KV"
            assert sequence not in self.waiting, f"{sequence.id} runs and waits"
        ranks = [sequence.rank for sequence in self.waiting]
        assert ranks == sorted(set(ranks)), "a request waits out of order"
        assert all(not s.pages and not s.computed for s in self.waiting), "a waiting request holds KV"


def _share(budget: int) -> int:
    """What one long request may take of a budget that others want too."""
    return (budget + 1) // 2
