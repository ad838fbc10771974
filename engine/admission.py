"""Who begins to run: in the order of the queue while there is room, or in the place of somebody less urgent."""

from __future__ import annotations

from collections.abc import Iterable

from engine.config import EngineConfig
from engine.fairness import FairShare
from engine.memory import Page
from engine.running import Running
from engine.sequence import TokenSequence
from engine.token_budget import TokenBudget, share
from engine.waiting import WaitingQueue


class Admission:
    """Lets requests run when there is a slot, pages for all that they know, and a share of the next step for them."""

    def __init__(
        self, running: Running, waiting: WaitingQueue, shares: FairShare, budget: TokenBudget, config: EngineConfig
    ) -> None:
        self.max_num_seqs = config.max_num_seqs
        self._running = running
        self._waiting = waiting
        self._shares = shares
        self._budget = budget
        self._window_s = config.batch_window_ms / 1000

    def admit(self, now_s: float) -> tuple[list[TokenSequence], list[TokenSequence]]:
        """Who was admitted, and who was preempted for it."""
        admitted: list[TokenSequence] = []
        preempted: list[TokenSequence] = []
        if self.max_num_seqs >= 1 and not self._waits_for_companions(now_s):
            if len(self._running) < self.max_num_seqs:
                self._in_order(now_s, admitted)
            self._urgent(now_s, admitted, preempted)
        return admitted, preempted

    def _in_order(self, now_s: float, admitted: list[TokenSequence]) -> None:
        """Strictly in the order of the queue; only those who wait for another's prefix are passed."""
        running, pool = self._running, self._running.pool
        budget, least = self._left_by(running)
        passed = 0
        for sequence in self._waiting.in_order(now_s):
            if len(running) >= self.max_num_seqs or budget < least or passed > self.max_num_seqs:
                return
            matched = running.sharing.match(sequence)
            if running.sharing.comes(sequence, len(matched), self._waiting.level(sequence, now_s)):
                pool.release(matched)
                passed += 1
            elif pool.available >= running.pages_to_begin(sequence, len(matched)) + self._kept():
                self._begin(sequence, matched, now_s, admitted)
                budget -= min(sequence.remaining, share(budget))
            else:
                pool.release(matched)
                return

    def _urgent(self, now_s: float, admitted: list[TokenSequence], preempted: list[TokenSequence]) -> None:
        """In the place of running ones of a lower class, the most urgent first."""
        running = self._running
        while len(running):
            urgent = self._waiting.most_urgent
            if urgent is None or urgent >= running[-1].level:
                return
            sequence = next(self._waiting.in_order(now_s, urgent))
            matched = running.sharing.match(sequence)
            victims = self._victims(sequence, running.pages_to_begin(sequence, len(matched)))
            budget, least = self._left_by([other for other in running if other.level <= urgent])
            if victims is None or budget < least:
                running.pool.release(matched)
                return
            for victim in victims:
                running.make_way(victim, now_s)
            preempted += victims
            self._begin(sequence, matched, now_s, admitted)

    def _victims(self, sequence: TokenSequence, pages: int) -> list[TokenSequence] | None:
        """Who has to make way so that the sequence gets so many pages; None if even that is not enough.

        Only requests of a class below its priority do: what it gained by waiting takes nobody's place.
        """
        running = self._running
        free = running.pool.available
        staying = len(running)
        victims: list[TokenSequence] = []
        while not ((victims or staying < self.max_num_seqs) and free >= pages + staying):
            if not staying or running[staying - 1].level <= sequence.priority:
                return None
            staying -= 1
            victims.append(running[staying])
            free = running.pool.available + running.freed_by(victims)
        return victims

    def _begin(self, sequence: TokenSequence, matched: list[Page], now_s: float, admitted: list[TokenSequence]) -> None:
        self._running.begin(sequence, matched, now_s)
        if not sequence.preemptions:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
            self._shares.begin(sequence.tenant, sequence.remaining)
        admitted.append(sequence)

    def _left_by(self, running: Iterable[TokenSequence]) -> tuple[int, int]:
        """Tokens of the next step that these leave to prompts, and what a prompt has to get of them to begin."""
        remaining = [sequence.remaining for sequence in running]
        decoding = remaining.count(1)
        budget = self._budget.prompts(decoding)
        for tokens in remaining:
            budget -= min(tokens, share(budget)) if tokens > 1 else 0
        return budget, self._budget.least(decoding)

    def _waits_for_companions(self, now_s: float) -> bool:
        """Whether the window is open in which new requests gather.

        It ends when the first of them has waited long enough, when as many wait as there are slots, or
        when their prompts fill the next step anyway. Nobody is waited for if nobody decodes, if
        another prompt is being computed, or if somebody returns.
        """
        waiting, running = self._waiting, self._running
        if not self._window_s or not len(running) or waiting.returning:
            return False
        if now_s - waiting.oldest_s >= self._window_s or len(waiting) >= self.max_num_seqs - len(running):
            return False
        if any(sequence.remaining > 1 for sequence in running):
            return False
        return sum(sequence.remaining for sequence in waiting) < self._budget.prompts(len(running))

    def _kept(self) -> int:
        """Pages that admission in order leaves to those who run: one for each, or the watermark if that is more."""
        running = self._running
        return max(len(running), running.pool.watermark_pages) if len(running) else 0
