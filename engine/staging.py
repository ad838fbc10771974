"""A step's numbers on their way to the device: all in one copy, from memory that it reads by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT_BYTES = 16
"""Of each part, so that a kernel is never compiled once more because a step's numbers lie elsewhere."""
TURNS = 2
"""Buffers: one is read by the step under way while the next one's numbers are written."""
LEAST_BYTES = 2**16


class Fence(Protocol):
    """A place in the order of what the device does."""

    def set(self) -> None:
        """Stand behind all that it was told until now."""
        ...

    def wait(self) -> None:
        """Return when it has got here; at once if the fence was never set."""
        ...


class HostFence:
    """Of a device that is the host: what it was told is done."""

    def set(self) -> None:
        pass

    def wait(self) -> None:
        pass


class CudaFence:
    """Of a CUDA device's current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def set(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


def fences(device: torch.device) -> Callable[[], Fence]:
    """What makes fences of a device."""
    return CudaFence if device.type == "cuda" else HostFence


@dataclass(slots=True)
class _Buffer:
    """Host memory, and when the device has read it."""

    fence: Fence
    host: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


class Staging:
    """Buffers that take turns; each is written again once the device has read what was in it."""

    def __init__(self, device: torch.device, fence: Callable[[], Fence] | None = None) -> None:
        self._device = device
        make = fence or fences(device)
        self._buffers = [_Buffer(make()) for _ in range(TURNS)]
        self._turn = 0

    def send(self, parts: Sequence[NDArray[Any]], into: Tensor | None = None) -> list[Tensor]:
        """Each part on the device: views of one new tensor, or of `into` [bytes] uint8, as `layout` places them."""
        places, size = layout(parts)
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % TURNS
        buffer.fence.wait()
        if len(buffer.host) < size:
            room = max(LEAST_BYTES, 2 * size)
            buffer.host = torch.empty(room, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        memory = buffer.host.numpy()
        for part, place in zip(parts, places, strict=True):
            memory[place : place + part.nbytes] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        if into is None:
            into = torch.empty(size, dtype=torch.uint8, device=self._device)
        into[:size].copy_(buffer.host[:size], non_blocking=True)
        buffer.fence.set()
        return views(parts, into)


def layout(parts: Sequence[NDArray[Any]]) -> tuple[list[int], int]:
    """Where each part begins, in bytes, and where the last one ends."""
    places, size = [], 0
    for part in parts:
        places.append(size)
        size += -(-part.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return places, size


def views(parts: Sequence[NDArray[Any]], packed: Tensor) -> list[Tensor]:
    """The parts as they lie in `packed` [bytes] uint8, of their shapes and types."""
    return [
        packed[place : place + part.nbytes].view(_TYPES[part.dtype]).view(part.shape)
        for part, place in zip(parts, layout(parts)[0], strict=True)
    ]


_TYPES = {
    np.dtype(np.float64): torch.float64,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
}
