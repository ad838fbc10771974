"""Looks at every load and store of interpreted kernels: out of bounds, misaligned, or racing with another program.

Each tensor argument is copied between guards, so that an access that leaves it never lands in another one. A byte
has a shadow that names the program that wrote it and the one that read it. Programs of a launch run one after the
other here and at once on a GPU: what one writes, no other may read or write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

GUARD_BYTES = 4096
MANY = -1
"""In place of a program's number: several have read this byte."""

Array = NDArray[Any]


class OutOfBounds(RuntimeError):
    """A lane touched memory outside the tensor arguments, or not aligned to its own size."""


class Race(RuntimeError):
    """Two programs, or two lanes of one store, touched one address, and not both only read it."""


@dataclass
class Region:
    """One storage, copied between guards; shadows count programs from 1."""

    copy: torch.Tensor
    first: int
    """Address of its first byte."""
    size: int
    writer: Array
    reader: Array


@dataclass
class Report:
    """What the launches under the sanitiser moved, in bytes."""

    launches: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    distinct_loaded_bytes: int = 0
    """Each byte counted once for each launch: what has to come from memory at least."""
    products: int = 0
    """Multiplications in matrix products."""


@dataclass
class _Watch:
    report: Report
    program: int = 0
    place: tuple[int, ...] = ()
    regions: list[Region] = field(default_factory=list)

    def begin(self, regions: list[Region]) -> None:
        self.regions = sorted(regions, key=lambda region: region.first)
        self.firsts = np.array([region.first for region in self.regions], np.int64)
        self.program = 0
        self.report.launches += 1

    def end(self) -> None:
        self.report.distinct_loaded_bytes += sum(int(np.count_nonzero(r.reader)) for r in self.regions)
        self.regions = []

    def spans(self, pointers: Any, mask: Any, what: str) -> Iterator[tuple[Region, Array]]:
        """The bytes [lanes, size] behind the active pointers, as offsets into each region that they touch."""
        size = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        address = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))
        address = address[np.broadcast_to(mask.data, address.shape)].astype(np.int64)
        if np.any(address % size):
            raise OutOfBounds(f"{what} of program {self.place} is not aligned to {size} bytes")
        at = np.searchsorted(self.firsts, address, side="right") - 1
        for index in np.unique(at):
            offset = address[at == index] - (self.firsts[index] if index >= 0 else 0)
            region = self.regions[index]
            outside = offset > region.size - size if index >= 0 else np.ones_like(offset, bool)
            if np.any(outside):
                raise OutOfBounds(f"{what} of program {self.place}: {int(outside.sum())} lanes outside every tensor")
            yield region, offset[:, None] + np.arange(size)

    def load(self, pointers: Any, mask: Any) -> None:
        for region, span in self.spans(pointers, mask, "load"):
            self.report.loaded_bytes += span.size
            writer = region.writer[span]
            if np.any((writer != 0) & (writer != self.program)):
                raise Race(f"program {self.place} reads what program number {writer.max()} of the same launch wrote")
            reader = region.reader[span]
            region.reader[span] = np.where((reader == 0) | (reader == self.program), self.program, MANY)

    def store(self, pointers: Any, mask: Any) -> None:
        for region, span in self.spans(pointers, mask, "store"):
            self.report.stored_bytes += span.size
            if len(np.unique(span[:, 0])) < len(span):
                raise Race(f"two lanes of one store of program {self.place} hit one address")
            for shadow, did in ((region.writer, "wrote"), (region.reader, "read")):
                other = shadow[span]
                if np.any((other != 0) & (other != self.program)):
                    raise Race(f"program {self.place} writes what another program of the same launch {did}")
            region.writer[span] = self.program


@contextmanager
def sanitized() -> Iterator[Report]:
    """Check every access of the kernels that are interpreted meanwhile; the report counts what they moved."""
    watch = _Watch(Report())
    names = {
        InterpreterBuilder: ["create_masked_load", "create_masked_store", "set_grid_idx", "create_atomic_rmw",
                             "create_dot"],
        GridExecutor: ["_init_args_hst", "_restore_args_dev"],
    }  # fmt: skip
    originals = {(owner, name): getattr(owner, name) for owner, found in names.items() for name in found}
    for (owner, name), original in originals.items():
        setattr(owner, name, _WRAPPERS[name](watch, original))
    try:
        yield watch.report
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


def _guard(tensors: list[torch.Tensor]) -> dict[int, Region]:
    """A guarded copy of each storage, by its address."""
    regions: dict[int, Region] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if not size or storage.data_ptr() in regions:
            continue
        whole = torch.empty(size + 2 * GUARD_BYTES + 256, dtype=torch.uint8)
        start = GUARD_BYTES + (-(whole.data_ptr() + GUARD_BYTES)) % 256
        copy = whole[start : start + size]
        copy.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        shadows = np.zeros((2, size), np.int32)
        regions[storage.data_ptr()] = Region(copy, copy.data_ptr(), size, shadows[0], shadows[1])
    return regions


def _moved(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The same view of the guarded copy."""
    start = region.copy.storage_offset() + tensor.storage_offset() * tensor.element_size()
    moved = torch.empty(0, dtype=tensor.dtype)
    return moved.set_(region.copy.untyped_storage(), start // tensor.element_size(), tensor.size(), tensor.stride())


def _init(watch: _Watch, original: Any) -> Any:
    def init(self: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = original(self, args, kwargs)
        everything = [*args, *kwargs.values()]
        regions = _guard([each for each in everything if isinstance(each, torch.Tensor)])

        def guarded(argument: Any) -> Any:
            if not isinstance(argument, torch.Tensor) or not argument.untyped_storage().nbytes():
                return argument
            return _moved(argument, regions[argument.untyped_storage().data_ptr()])

        watch.begin(list(regions.values()))
        return [guarded(each) for each in args], {name: guarded(each) for name, each in kwargs.items()}

    return init


def _restore(watch: _Watch, original: Any) -> Any:
    def restore(self: Any, args: Any, args_host: Any, kwargs: Any, kwargs_host: Any) -> None:
        pairs = [*zip(args, args_host, strict=True), *((kwargs[name], kwargs_host[name]) for name in kwargs)]
        firsts = {region.copy.untyped_storage().data_ptr(): region for region in watch.regions}
        for device, host in pairs:
            if isinstance(device, torch.Tensor) and device.untyped_storage().nbytes():
                region = firsts[host.untyped_storage().data_ptr()]
                torch.empty(0, dtype=torch.uint8, device=device.device).set_(device.untyped_storage()).copy_(
                    region.copy
                )
        watch.end()

    return restore


def _grid(watch: _Watch, original: Any) -> Any:
    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        watch.program += 1
        watch.place = (x, y, z)
        original(self, x, y, z)

    return set_grid_idx


def _load(watch: _Watch, original: Any) -> Any:
    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        watch.load(pointers, mask)
        return original(self, pointers, mask, *rest)

    return load


def _store(watch: _Watch, original: Any) -> Any:
    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.store(pointers, mask)
        return original(self, pointers, value, mask, *rest)

    return store


def _atomic(watch: _Watch, original: Any) -> Any:
    def atomic(self: Any, *rest: Any) -> Any:
        raise NotImplementedError("the sanitiser knows no atomics: none of these kernels has any")

    return atomic


def _product(watch: _Watch, original: Any) -> Any:
    def product(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        watch.report.products += int(np.prod(a.data.shape)) * b.data.shape[-1]
        return original(self, a, b, *rest)

    return product


_WRAPPERS: dict[str, Any] = {
    "_init_args_hst": _init,
    "_restore_args_dev": _restore,
    "set_grid_idx": _grid,
    "create_masked_load": _load,
    "create_masked_store": _store,
    "create_atomic_rmw": _atomic,
    "create_dot": _product,
}
