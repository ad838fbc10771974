"""What the engine has done since it was made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine.contract import EngineStats
from engine.scheduler import Scheduler


@dataclass(slots=True)
class Counters:
    """The counters of `engine.contract.EngineStats`."""

    last_step_s: float
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    max_batch_size: int = 0
    requests_finished: Counter[str] = field(default_factory=Counter)

    def stats(self, scheduler: Scheduler) -> EngineStats:
        """The counters beside what the scheduler holds now."""
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            max_num_seqs=scheduler.admission.max_num_seqs,
            running_by_priority=dict(Counter(sequence.priority for sequence in scheduler.running)),
            waiting_by_priority=scheduler.waiting.by_priority(),
            pages_total=scheduler.pool.total,
            pages_free=scheduler.pool.available,
            steps=self.steps,
            last_step_s=self.last_step_s,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            preemptions=self.preemptions,
            swaps=scheduler.running.preemption.swaps,
            swapped_pages=scheduler.running.preemption.swapped_pages,
            evictions=scheduler.pool.evictions,
            cached_tokens=self.cached_tokens,
            fragmentation=scheduler.pool.fragmentation,
            max_batch_size=self.max_batch_size,
            requests_finished=dict(self.requests_finished),
        )
