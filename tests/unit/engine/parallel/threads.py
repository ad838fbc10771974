"""Ranks as threads of one process: what they compute and exchange is the same, and they start at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.batch import Batch
from engine.parallel.group import Group
from engine.runner import TorchModel
from kernels.sampling import Sampled

T = TypeVar("T")
CPU = torch.device("cpu")


def on_ranks(place: Path, ranks: int, work: Callable[[Group], T], patience_s: float = 20.0) -> list[T | Exception]:
    """What each rank's work gives or raises."""

    def run(rank: int) -> T | Exception:
        try:
            return work(Group.join(place / "meeting", rank, ranks, CPU, patience_s))
        except Exception as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


class Divided:
    """A model whose other ranks get each batch of the first."""

    def __init__(self, own: TorchModel, others: Sequence[queue.SimpleQueue[Any]]) -> None:
        self._own = own
        self._others = others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def execute(self, batch: Batch) -> Sampled:
        for other in self._others:
            other.put(batch)
        return self._own.execute(batch)


@contextmanager
def divided(
    place: Path, ranks: int, load: Callable[[Group], TorchModel], prepare: Callable[[TorchModel], None]
) -> Iterator[Any]:
    """The model of `load` over several ranks, each prepared before its first step."""
    batches: list[queue.SimpleQueue[Batch | None]] = [queue.SimpleQueue() for _ in range(ranks - 1)]

    def follow(rank: int) -> None:
        model = load(Group.join(place / "meeting", rank, ranks, CPU, 20.0))
        prepare(model)
        while (batch := batches[rank - 1].get()) is not None:
            assert model.execute(batch).tokens == []
        model.close()

    followers = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, ranks)]
    for follower in followers:
        follower.start()
    own = load(Group.join(place / "meeting", 0, ranks, CPU, 20.0))
    prepare(own)
    yield Divided(own, batches)
    for queued in batches:
        queued.put(None)
    for follower in followers:
        follower.join()
    own.close()
