"""What each step computes. One rule: a request whose computed tokens are fewer than its known ones gets more.

Prefill, chunked prefill, decode and the return after a preemption are the same thing with different
numbers left. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.admission import Admission
from engine.compression import KVCompression
from engine.config import EngineConfig
from engine.fairness import FairShare
from engine.memory import PagePool
from engine.memory.swap import SwapSpace
from engine.running import Running
from engine.sequence import TokenSequence
from engine.speculation import Drafter, Speculation
from engine.token_budget import TokenBudget
from engine.waiting import WaitingQueue


class Chunk(NamedTuple):
    """Tokens `start : end` of a sequence, to be computed in this step. Behind the known ones stand its drafts."""

    sequence: TokenSequence
    start: int
    end: int

    @property
    def choices(self) -> int:
        """Tokens that the step chose: what may come after the last one known, and after each draft.

        None if the chunk doesn't reach the last one known, or no token may come after it.
        """
        known = len(self.sequence.tokens)
        return self.end - known + 1 if self.end >= known < self.sequence.max_len else 0


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

    def __init__(
        self,
        pool: PagePool,
        config: EngineConfig,
        swap: SwapSpace | None = None,
        cheap_rows: int = 0,
        reach_tokens: int | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`cheap_rows`: see `engine.batch.Model`; `reach_tokens`: see `engine.batch.ModelInfo`."""
        self.pool = pool
        self._reach_tokens = reach_tokens
        self._drafter = drafter
        self.speculation = Speculation(config.num_speculative_tokens, cheap_rows)
        self.budget = TokenBudget(config.max_num_batched_tokens, config.prefill_share)
        self.shares = FairShare(config.tenant_weights)
        self.waiting = WaitingQueue(self.shares, config.aging_s)
        self.compression = config.kv_compression
        self.running = Running(pool, self.waiting, swap, self.compression)
        self.admission = Admission(self.running, self.waiting, self.shares, self.budget, config)

    def fits(self, sequence: TokenSequence) -> bool:
        """Whether the sequence could run to its end if it had the pool for itself."""
        return self.pool.pages_for(self.compression.most_slots(sequence.kv_tokens)) <= self.pool.total

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
            self.running.preemption.discard(sequence)
        else:
            self.running.end(sequence)

    def plan(self, now_s: float) -> Plan:
        """Choose the next step's chunks."""
        admitted, preempted = self.admission.admit(now_s) if self.waiting else ([], [])
        budget = self.budget.tokens
        chunks: list[Chunk] = []
        longer: list[TokenSequence] = []
        page_size, thins = self.pool.page_size, self.compression.thins
        for sequence in tuple(self.running):
            pages, known = len(sequence.pages), len(sequence.tokens) + sequence.coming
            launched, evicted = sequence.computed + sequence.ahead, sequence.evicted
            if not pages or launched == known:
                continue  # preempted by one before it, or its last token is under way
            if thins and self.compression.due(launched, launched - evicted):
                continue  # to be thinned before it goes on
            if known - launched > 1:
                longer.append(sequence)
            elif budget and (known - evicted <= pages * page_size or self._grow(sequence, now_s, preempted)):
                chunks.append(Chunk(sequence, launched, known))
                budget -= 1
        prompts = self.budget.prompts(len(chunks)) if longer else 0
        if self.speculation:
            chunks = self._guess(chunks, budget - prompts, len(chunks) + prompts)
        if longer:
            chunks += _prefill(longer, prompts, self.compression)
        return Plan(tuple(chunks), tuple(admitted), tuple(preempted))

    def commit(self, chunks: Sequence[Chunk]) -> list[int]:
        """Note that the KV of these chunks' known tokens is written; how many choices each brings."""
        page_size = self.pool.page_size
        choices = [chunk.choices for chunk in chunks]
        given: dict[str, int] = {}
        for (sequence, _, end), count in zip(chunks, choices, strict=True):
            sequence.computed = min(end, len(sequence.tokens))
            if end // page_size > sequence.shared_pages and sequence.root is not None:
                self.running.sharing.publish(sequence)
            if self._reach_tokens is not None:
                self.running.give_back(sequence, self._reach_tokens)
            if count:
                given[sequence.tenant] = given.get(sequence.tenant, 0) + 1
        for tenant, tokens in given.items():
            self.shares.charge(tenant, tokens)
        return choices

    def accept(self, sequence: TokenSequence, drafts: int) -> None:
        """Note that so many of the drafts have come true: their KV is written."""
        sequence.computed += drafts
        self.shares.charge(sequence.tenant, drafts)
        if sequence.computed // self.pool.page_size > sequence.shared_pages and sequence.root is not None:
            self.running.sharing.publish(sequence)

    def make_room(self, pages: int, now_s: float) -> list[TokenSequence]:
        """Preempt the last in rank until at most so many pages are held."""
        preempted: list[TokenSequence] = []
        while self.pool.held > pages:
            preempted.append(self.running[-1])
            self.running.make_way(self.running[-1], now_s)
        return preempted

    def check(self) -> None:
        """Raise AssertionError if queues, pages and counts don't agree."""
        self.running.check()
        self.waiting.check()
        self.running.preemption.check(list(self.waiting))

    def _guess(self, chunks: list[Chunk], budget: int, rows: int) -> list[Chunk]:
        """The chunks of decoding sequences, with drafts behind their last tokens; nobody makes way for a draft."""
        self.speculation.begin(rows)
        page_size = self.pool.page_size
        guessed = []
        for sequence, start, end in chunks:
            room = len(sequence.pages) * page_size - end + sequence.evicted
            if not room and self.pool.available > len(self.running):
                sequence.pages += self.pool.allocate(1)
                room = page_size
            most = min(room, budget)
            if self.compression.thins:
                most = min(most, self.compression.next_stop(start) - end)
            sequence.drafts = self.speculation.guess(sequence, most)
            budget -= len(sequence.drafts)
            guessed.append(Chunk(sequence, start, end + len(sequence.drafts)))
        return guessed if self._drafter is None else self._draft(self._drafter, guessed, budget, rows)

    def _draft(self, drafter: Drafter, chunks: list[Chunk], budget: int, rows: int) -> list[Chunk]:
        """The same chunks, with the draft model's guesses where there are no others."""
        page_size = self.pool.page_size
        wanted: list[tuple[TokenSequence, int]] = []
        for sequence, _, end in chunks:
            room = min(len(sequence.pages) * page_size - end, budget)
            most = 0 if sequence.drafts else self.speculation.most(sequence, room)
            if most:
                wanted.append((sequence, most))
                budget -= most
        if not wanted:
            return chunks
        for (sequence, _), drafts in zip(wanted, drafter.propose(wanted, rows), strict=True):
            sequence.drafts = drafts
        return [
            Chunk(chunk.sequence, chunk.start, len(chunk.sequence.tokens) + len(chunk.sequence.drafts))
            if chunk.sequence.drafts
            else chunk
            for chunk in chunks
        ]

    def _grow(self, sequence: TokenSequence, now_s: float, preempted: list[TokenSequence]) -> bool:
        """Give a decoding sequence the page that its next token goes to, at the cost of the last in rank."""
        while not self.pool.available:
            victim = self.running[-1]
            if victim is sequence:
                return False
            self.running.make_way(victim, now_s)
            preempted.append(victim)
        sequence.pages += self.pool.allocate(1)
        return True


def _prefill(sequences: list[TokenSequence], budget: int, compression: KVCompression) -> list[Chunk]:
    """Divide the budget in order of rank; one sequence takes at most half of it if the others can use the rest.

    No chunk reaches over a position at which its sequence is thinned.
    """
    chunks = []
    wanted = sum(sequence.remaining for sequence in sequences)
    for sequence in sequences:
        if not budget:
            break
        wanted -= sequence.remaining
        count = min(sequence.remaining, budget - min(wanted, budget // 2))
        launched = sequence.computed + sequence.ahead
        if compression.thins:
            count = min(count, compression.next_stop(launched) - launched)
        chunks.append(Chunk(sequence, launched, launched + count))
        budget -= count
    return chunks
