"""A torch model's KV memory: one tensor of bytes, on whatever device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.memory import Move
from engine.memory.arena import Arena
from kernels.kv import UNIT_BYTES, KVLayout
from kernels.protocol import Kernels


class TorchStorage:
    """`engine.memory.storage.KVStorage`: in an arena on the CPU, in one allocation elsewhere."""

    def __init__(
        self,
        kernels: Kernels,
        layout: KVLayout,
        units: int,
        most_units: int,
        device: torch.device,
        *,
        unused_page: bool = False,
    ) -> None:
        """Room for `units` units; for up to `most_units` if addresses without memory can be had.

        There is one more extent if there has to be an unused page.
        """
        self.layout = layout
        self._kernels = kernels
        behind = 1 << layout.extent_order if unused_page else 0
        self._arena = Arena.reserve(units + behind, most_units + behind) if device.type == "cpu" else None
        if self._arena is None:
            self.bytes = torch.empty((units + behind) * UNIT_BYTES, dtype=torch.uint8, device=device)
        else:
            self.bytes = torch.from_numpy(self._arena.bytes)
        self.units = len(self.bytes) // UNIT_BYTES - behind

    @property
    def unused_page(self) -> int:
        """The page behind all others, if there is one: nobody gets it, and whatever is written there is lost."""
        return (self.units >> self.layout.extent_order) * self.layout.pages_per_extent

    def copy_pages(self, moves: Sequence[Move]) -> None:
        if moves:
            source, target = torch.tensor(moves, device=self.bytes.device).unbind(1)
            self._kernels.copy_pages(self.bytes, self.layout, source, target)

    def save_pages(self, pages: Sequence[int]) -> Tensor:
        """[n, page_bytes] uint8 on the host."""
        saved = torch.empty(len(pages), self.layout.page_bytes, dtype=torch.uint8)
        for row, page in zip(saved, pages, strict=True):
            row.copy_(self._page(page), non_blocking=True)
        self._wait()
        return saved

    def load_pages(self, saved: Tensor, pages: Sequence[int]) -> None:
        for row, page in zip(saved, pages, strict=True):
            self._page(page).copy_(row, non_blocking=True)
        self._wait()

    def decommit(self, runs: Iterable[tuple[int, int]]) -> None:
        if self._arena is not None:
            for first, count in runs:
                self._arena.decommit(first, count)

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()

    def _page(self, page: int) -> Tensor:
        begin = self.layout.offset_bytes(page)
        return self.bytes[begin : begin + self.layout.page_bytes]

    def _wait(self) -> None:
        if self.bytes.is_cuda:
            torch.cuda.current_stream(self.bytes.device).synchronize()
