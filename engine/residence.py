"""What a model has in memory: its weights, the pages of its KV, and host memory for pages that made way."""

from __future__ import annotations

import logging

from engine.batch import Model, NoNumbers
from engine.config import EngineConfig
from engine.executor import Executor, ModelFailed
from engine.memory import Buddy, Extents, PagePool
from engine.memory.budget import Demand, MemoryBudget, NoRoom, resized, solve
from engine.memory.machine import machine_bytes
from engine.memory.storage import KVStorage
from engine.memory.swap import SwapSpace
from engine.scheduler import Chunk
from engine.sequence import TokenSequence
from kernels.kv import UNIT_BYTES

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 128
"""Most tokens of the step that verifies the budget; its finding holds in proportion for the whole token budget."""
MOST_FRAGMENTATION = 0.3
"""Share of free places in the leased extents above which pages move together."""
MOVES_PER_TURN = 32
"""Pages that move between two steps."""
RELEASE_EVERY_S = 10.0
"""Memory that nobody has used for so long is given back. Sooner would cost more than it saves: the system zeroes every
page that it lends again, and a busy engine takes and leaves extents all the time."""


class Residence:
    """The memory of one engine, from its budget to its pages. Between steps only."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self._model = model
        self._config = config
        self._layout = model.kv_layout(config.page_size)
        self.max_seq_len = min(config.max_seq_len, model.info.context_len)
        """Most tokens of one request, prompt and output; the KV memory has room for it."""
        self._demand = Demand(
            utilization=config.gpu_memory_utilization,
            kv_bytes=config.kv_cache_bytes,
            default_kv_bytes=model.default_kv_bytes,
            context_tokens=self.max_seq_len,
            context_slots=config.kv_compression.most_slots(self.max_seq_len),
            margin=config.memory_margin,
            beside=model.info.draft_kv_bytes_per_token / model.info.kv_bytes_per_token,
        )
        self.budget = self._solve(model.activation_bytes(config.max_num_batched_tokens, config.max_num_seqs))
        if config.warm_up:
            self.budget = self._solve(self._verified_activation_bytes())
        log.info("memory: %s", self.budget)
        self.storage = self._allocate(self.budget.pages)
        model.record()
        self.pool = self._new_pool(self.storage, self.budget.pages)
        self.pool.watermark_pages = self.budget.watermark_pages
        self.swap = SwapSpace(self.storage, config.swap_space_bytes)
        self.asleep = False
        self._next_release_s = 0.0

    def fresh_pool(self) -> PagePool:
        """An empty pool in the place of the present one; what was swapped is lost with it."""
        self.pool = self._new_pool(self.storage, self.pool.total)
        self.pool.watermark_pages = self.budget.watermark_pages
        self.swap = SwapSpace(self.storage, self._config.swap_space_bytes)
        return self.pool

    def compact(self, most_pages: int = MOVES_PER_TURN) -> int:
        """Move up to so many pages together, if free places are too scattered; how many were moved."""
        if self.pool.fragmentation <= MOST_FRAGMENTATION:
            return 0
        moves = self.pool.compact(most_pages)
        self.storage.copy_pages(moves)
        return len(moves)

    def tidy(self, now_s: float) -> bool:
        """Compact a little, or else give back the memory of extents that have been empty for some time.

        False if nothing is left to do now; at `release_s` there may be again.
        """
        if self.asleep:
            return False
        if self.compact():
            return True
        if now_s < self._next_release_s:
            return False
        self._next_release_s = now_s + RELEASE_EVERY_S
        aged = self.pool.extents.buddy.take_aged()
        self.storage.decommit(aged)
        return bool(aged)

    @property
    def release_s(self) -> float | None:
        """When `tidy` may have memory to give back; None if there is none."""
        return None if self.asleep or not self.pool.extents.buddy.has_stale else self._next_release_s

    def relieve(self) -> None:
        """Give back all memory that nobody holds: the device is short of it."""
        self.pool.drop_cached()
        self.storage.decommit(self.pool.extents.buddy.take_stale())

    def plan_size(self, kv_bytes: int) -> MemoryBudget:
        """What the KV would have in `kv_bytes`; raises `NoRoom` if that is less than one request, or not there."""
        budget = resized(self.budget, self._demand, kv_bytes, self._layout)
        if kv_bytes > self.budget.kv_bytes:
            memory = self._model.memory()
            other_bytes = memory.used_bytes - self.pool.extents.leased * self._layout.extent_bytes
            left_bytes = int(self._demand.utilization * memory.total_bytes) - other_bytes - budget.activation_bytes
            left_bytes = int(left_bytes / (1 + self._demand.beside))
            most_bytes = min(left_bytes, self._layout.bytes_for(self.pool.extents.ids))
            if kv_bytes > most_bytes:
                raise NoRoom(f"the KV memory can't grow to {kv_bytes} bytes: it can have {most_bytes} now")
        return budget

    def resize(self, budget: MemoryBudget) -> None:
        """Have the KV memory of `plan_size`; no more of its pages may be held."""
        self.storage.copy_pages(self.pool.resize(budget.pages))
        self.storage.decommit(self.pool.extents.buddy.take_stale())
        self.pool.watermark_pages = budget.watermark_pages
        self.budget = budget
        log.info("memory: %s", budget)

    def sleep(self) -> None:
        """Give the memory of weights and KV back. Nobody may hold a page; what is cached is lost."""
        if self.pool.held:
            raise RuntimeError(f"{self.pool.held} pages are held, the memory can't be given back")
        self.pool.forget()
        self.pool.extents.buddy.take_stale()
        self._model.release_kv()
        self._model.sleep()
        self.asleep = True

    def wake(self) -> None:
        """Have the same weights and as much KV memory again. Raises and stays asleep if they can't be had."""
        self._model.wake()
        try:
            self.storage = self.swap.storage = self._allocate(self.pool.total, self.pool.extents.buddy.units)
            self._model.record()
        except BaseException:
            self._model.release_kv()
            self._model.sleep()
            raise
        self.asleep = False

    def check(self) -> None:
        """Raise AssertionError if the swap space's counts are wrong; the scheduler checks the pool with its holders."""
        self.swap.check()

    def _solve(self, activation_bytes: int) -> MemoryBudget:
        return solve(self._demand, self._model.memory(), activation_bytes, self._layout)

    def _allocate(self, pages: int, units: int = 0) -> KVStorage:
        """Storage for the pages, with addresses to grow into: those of the whole machine, or `units` exactly."""
        least = self._layout.units_for(pages)
        most = units or max(least, machine_bytes() // UNIT_BYTES)
        return self._model.allocate_kv(self._layout, units or least, most)

    def _new_pool(self, storage: KVStorage, pages: int) -> PagePool:
        layout = storage.layout
        extents = Extents(Buddy(storage.units), layout.extent_order, layout.pages_per_extent)
        return PagePool(pages, layout.page_size, extents)

    def _verified_activation_bytes(self) -> int:
        """What a step of the whole token budget needs, by the estimate or by what a smaller step really used.

        Raises `ModelFailed` for a model that computes no numbers: every answer would be the first token's.
        The step runs twice: what the first leaves behind is part of the memory in use, and what the second
        needs for a moment is its activations.
        """
        model, config = self._model, self._config
        tokens = min(config.max_num_batched_tokens, self.max_seq_len, WARM_UP_TOKENS)
        needed_pages = -(-tokens // config.page_size)
        pages = self._new_pool(self._allocate(needed_pages), needed_pages).allocate(needed_pages)
        executor = Executor(model, config.page_size)
        sequence = TokenSequence("warm-up", [0] * tokens, tokens, tokens + 1, pages=pages, logprobs=0)
        try:
            executor.execute([Chunk(sequence, 0, tokens)])
        except NoNumbers as error:
            raise ModelFailed(f"{error}: its weights or its configuration are damaged") from error
        before_bytes = model.memory().used_bytes
        model.take_peak_bytes()
        executor.execute([Chunk(sequence, 0, tokens)])
        used_bytes = max(0, model.take_peak_bytes() - before_bytes)
        model.release_kv()
        expected_bytes = model.activation_bytes(tokens, 1)
        whole_bytes = self.budget.activation_bytes
        if used_bytes > expected_bytes:
            corrected_bytes = whole_bytes + (used_bytes - expected_bytes) * config.max_num_batched_tokens // tokens
            log.warning(
                "a step of %d tokens used %d bytes, %d were expected: activations are taken to be %d bytes",
                tokens, used_bytes, expected_bytes, corrected_bytes,
            )  # fmt: skip
            return corrected_bytes
        log.info("a step of %d tokens used %d bytes, %d were expected", tokens, used_bytes, expected_bytes)
        return whole_bytes
