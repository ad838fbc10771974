"""How much memory the KV may take: the equation that `solve` states, and what is said when it has no solution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from engine.memory.machine import DeviceMemory
from kernels.kv import KVLayout

MiB = 2**20


class NoRoom(ValueError):
    """Not even one request of the context length fits; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of the memory."""

    utilization: float
    """Share of the device that may be used."""
    kv_bytes: int | None
    """What was asked for by name, None if nothing was."""
    default_kv_bytes: int | None
    """Taken if nothing was asked for; None is all that is left."""
    context_tokens: int
    """One request of this length must fit."""
    margin: float
    """Share of the KV memory that admission keeps free, for running requests to grow into."""
    context_slots: int | None = None
    """The most of that request's tokens that are kept at once; None for all."""
    beside: float = 0.0
    """Bytes that each byte of the KV takes besides: a draft model's KV."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The solution."""

    usable_bytes: int
    """What weights, activations and KV may take together."""
    used_bytes: int
    """What the process has taken before: the weights, and whatever else it holds."""
    activation_bytes: int
    """What a step of the whole token budget needs."""
    kv_bytes: int
    pages: int
    watermark_pages: int
    """Admission keeps so many pages free."""

    def __str__(self) -> str:
        return (
            f"{self.usable_bytes // MiB} MiB usable = {self.used_bytes // MiB} used (weights and the rest)"
            f" + {self.activation_bytes // MiB} activations + {self.left_bytes // MiB} left;"
            f" KV takes {self.kv_bytes // MiB}: {self.pages} pages, {self.watermark_pages} of them as margin"
        )

    @property
    def left_bytes(self) -> int:
        return self.usable_bytes - self.used_bytes - self.activation_bytes


def solve(demand: Demand, memory: DeviceMemory, activation_bytes: int, layout: KVLayout) -> MemoryBudget:
    """Divide a device's memory once the weights are in it.

        left = (utilization * total - used - activations) / (1 + beside)
        KV   = what was asked for, or the default, or all that is left; never more than is left

    Raises `NoRoom` if the KV can't hold one request of the context length.
    """
    usable = int(demand.utilization * memory.total_bytes)
    left = int((usable - memory.used_bytes - activation_bytes) / (1 + demand.beside))
    needed_bytes = layout.bytes_for(_context_pages(demand, layout))
    wanted = demand.kv_bytes
    if wanted is None and demand.default_kv_bytes is not None:
        wanted = max(demand.default_kv_bytes, needed_bytes)
    fixed = MemoryBudget(usable, memory.used_bytes, activation_bytes, kv_bytes=0, pages=0, watermark_pages=0)
    if wanted is not None and wanted <= left:
        return resized(fixed, demand, wanted, layout)
    if needed_bytes <= left:
        return resized(fixed, demand, left, layout)
    budget = replace(fixed, kv_bytes=max(0, left), pages=layout.pages_in(max(0, left)))
    raise NoRoom(f"{_too_little(demand, budget, layout)}{_remedy(demand, memory, budget, needed_bytes)}; {budget}")


def resized(budget: MemoryBudget, demand: Demand, kv_bytes: int, layout: KVLayout) -> MemoryBudget:
    """The budget with another size of the KV memory. Raises `NoRoom` if it can't hold one request."""
    needed_pages, pages = _context_pages(demand, layout), layout.pages_in(kv_bytes)
    watermark_pages = int(demand.margin * (pages - needed_pages))
    budget = replace(budget, kv_bytes=kv_bytes, pages=pages, watermark_pages=watermark_pages)
    if pages < needed_pages:
        raise NoRoom(f"{_too_little(demand, budget, layout)}raise kv_cache_bytes to {layout.bytes_for(needed_pages)}")
    return budget


def _context_pages(demand: Demand, layout: KVLayout) -> int:
    slots = demand.context_tokens if demand.context_slots is None else demand.context_slots
    return -(-slots // layout.page_size)


def _too_little(demand: Demand, budget: MemoryBudget, layout: KVLayout) -> str:
    """What doesn't fit, and the remedy that is the same whatever the cause."""
    needed_bytes = layout.bytes_for(_context_pages(demand, layout))
    tokens = budget.pages * layout.page_size
    return (
        f"the KV memory of {budget.kv_bytes} bytes holds {tokens} tokens, and one request of"
        f" {demand.context_tokens} tokens needs {needed_bytes} bytes: "
    ) + (f"lower max_seq_len to {tokens}, or " if tokens else "")


def _remedy(demand: Demand, memory: DeviceMemory, budget: MemoryBudget, needed_bytes: int) -> str:
    """How a device's memory can be made to do."""
    wanted_bytes = memory.used_bytes + budget.activation_bytes + int(needed_bytes * (1 + demand.beside))
    missing_bytes = wanted_bytes - memory.total_bytes
    if missing_bytes > 0:
        return f"free {missing_bytes // MiB + 1} MiB of memory"
    return f"raise gpu_memory_utilization to {ceil(100 * wanted_bytes / memory.total_bytes) / 100:.2f}"
