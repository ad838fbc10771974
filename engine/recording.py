"""Steps that are recorded once and replayed: by CUDA graphs, and on the host by doing the same again.

What is replayed reads and writes the very memory that was there when it was recorded. Both recorders say so when some
of it has been replaced; the host's looks at every operation, so that tests find what a GPU would silently get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Work = Callable[[], tuple[Tensor, ...]]
"""Computes from tensors that stay where they are; gives what it made."""
Held = Callable[[], Sequence[Tensor]]
"""The tensors that are to stay where they are, as they are now."""


class StaleRecording(RuntimeError):
    """Memory that a recording reads or writes has been replaced: it would compute with what isn't there any more."""


class Recording(Protocol):
    """Work that can be done again."""

    outputs: tuple[Tensor, ...]
    """What it makes: the same tensors each time, until something else of the same recorder is replayed."""

    def replay(self) -> None:
        """Do it again, with what the tensors hold now. Raises `StaleRecording` and does nothing if one was replaced."""
        ...


class Recorder(Protocol):
    """What makes recordings. Those of one recorder share the memory that they need in between."""

    def record(self, work: Work, held: Held) -> Recording:
        """Do some work, and keep how it is done."""
        ...


class CudaRecorder:
    """CUDA graphs on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work, held: Held) -> Recording:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()  # compiles what isn't, and allocates the libraries' own memory
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = work()
        return _CudaRecording(graph, outputs, held)


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, ...], held: Held) -> None:
        self.outputs = outputs
        self._graph = graph
        self._held = held
        self._addresses = _addresses(held)

    def replay(self) -> None:
        if _addresses(self._held) != self._addresses:
            raise StaleRecording("a tensor that a recorded step works on has been replaced")
        self._graph.replay()


class HostRecorder:
    """Does the same work again, into the same outputs. For tests: it saves no time."""

    def record(self, work: Work, held: Held) -> Recording:
        with _Found() as found:
            outputs = work()
        return _HostRecording(work, outputs, held, found.addresses)


class _HostRecording:
    def __init__(self, work: Work, outputs: tuple[Tensor, ...], held: Held, found: set[int]) -> None:
        self.outputs = outputs
        self._work = work
        self._held = held
        self._addresses = _addresses(held)
        self._found = found

    def replay(self) -> None:
        if _addresses(self._held) != self._addresses:
            raise StaleRecording("a tensor that a recorded step works on has been replaced")
        with _Found() as found:
            made = self._work()
        if found.addresses - self._found:
            raise StaleRecording("a recorded step worked on memory that it hadn't known when it was recorded")
        for output, new in zip(self.outputs, made, strict=True):
            output.copy_(new)


class _Found(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the memory that operations find, other than what they have made themselves."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.addresses: set[int] = set()
        self._made: dict[int, Tensor] = {}
        """Kept, so that no memory is used a second time meanwhile."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.lift_fresh.default:  # what is lifted was made of the host's numbers just now
            self.addresses.update(at for at, _ in _memory((args, kwargs)) if at not in self._made)
        self._made.update((at, tensor) for at, tensor in _memory(out) if at not in self.addresses)
        return out


def _memory(tree: Any) -> list[tuple[int, Tensor]]:
    """Each tensor and where its memory begins; not of those that have none, or hide it."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    return [(at, tensor) for tensor in tensors if (at := tensor.untyped_storage().data_ptr())]


def _addresses(held: Held) -> list[int]:
    return [tensor.data_ptr() for tensor in held()]
