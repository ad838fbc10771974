"""A scheduler over a page pool, without an engine; what holds for every plan is verified at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.memory import PagePool
from engine.scheduler import Plan, Scheduler
from engine.sequence import TokenSequence


class Bench:
    """A scheduler whose plans are carried out by adding a token wherever one is sampled."""

    def __init__(
        self, pages: int = 64, page_size: int = 4, seqs: int = 8, budget: int = 32, share: float = 1.0, **config: Any
    ) -> None:
        settings = EngineConfig("fake", max_num_seqs=seqs, max_num_batched_tokens=budget, prefill_share=share, **config)
        self.scheduler = Scheduler(PagePool(pages, page_size), settings)
        self.now_s = 0.0
        self.arrivals = 0
        self.finished: list[str] = []
        self.preempted = 0

    def add(self, prompt: int, output: int = 4, priority: int = 0, tenant: str = "default") -> TokenSequence:
        self.arrivals += 1
        sequence = TokenSequence(
            id=str(self.arrivals),
            tokens=[0] * prompt,
            prompt_tokens=prompt,
            max_len=prompt + output,
            priority=priority,
            tenant=tenant,
            arrival=self.arrivals,
        )
        self.scheduler.add(sequence, self.now_s)
        return sequence

    def step(self) -> Plan:
        plan = self.scheduler.plan(self.now_s)
        self.verify(plan)
        self.preempted += len(plan.preempted)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            [samples] = self.scheduler.commit([chunk])
            if samples:
                sequence.tokens.append(0)
                if len(sequence.tokens) == sequence.max_len:
                    self.scheduler.remove(sequence)
                    self.finished.append(sequence.id)
        self.scheduler.check()
        return plan

    def verify(self, plan: Plan) -> None:
        """What holds for every plan."""
        scheduler = self.scheduler
        scheduler.check()
        assert sum(chunk.end - chunk.start for chunk in plan.chunks) <= scheduler.budget.tokens
        assert len({chunk.sequence.id for chunk in plan.chunks}) == len(plan.chunks)
        slots: set[int] = set()
        for sequence, start, end in plan.chunks:
            assert sequence in scheduler.running
            assert sequence.computed == start < end <= len(sequence.tokens)
            slots |= {sequence.pages[at // scheduler.pool.page_size].id * 1000 + at for at in range(start, end)}
        assert len(slots) == sum(chunk.end - chunk.start for chunk in plan.chunks)
        assert bool(plan.chunks) == bool(len(scheduler.running))
        assert all(sequence in scheduler.waiting for sequence in plan.preempted)
        worst_running = max((sequence.rank for sequence in scheduler.running), default=(0, 0))
        assert all(sequence.rank > worst_running or plan.admitted for sequence in plan.preempted)

    def until(self, reached: Callable[[], bool], limit: int = 10_000) -> None:
        for _ in range(limit):
            if reached():
                return
            self.step()
        pytest.fail("no end in sight")

    def drain(self) -> None:
        self.until(lambda: not (self.scheduler.running or self.scheduler.waiting))
        assert self.scheduler.pool.available == self.scheduler.pool.total


def widths(plan: Plan) -> list[int]:
    return [chunk.end - chunk.start for chunk in plan.chunks]
