"""What ranks exchange within a step, and how a rank that fails in the middle of one leaves nobody waiting.

Ranks meet in every exchange of a step, in one order. If a rank raises between two of them, the others would
wait for it. So the exchanges of a step are known before it begins, and whoever raises takes part in those that are
left, with zeros: the step ends for all, its numbers are of no use, and it is said to have failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from engine.parallel.ranks import RankLost

distributed: Any = torch.distributed
"""Much of it has no types."""
LOOPBACK = "127.0.0.1"
MEETING_S = 300.0
"""How long ranks wait for each other before their first exchange; on a busy machine one may start late."""


class Exchange(NamedTuple):
    """One meeting of all ranks."""

    kind: Literal["sum", "gather"]
    shape: tuple[int, ...]
    """Of each rank's own tensor."""
    dtype: torch.dtype


class Group:
    """The ranks of one model, as one of them sees it. One thread at a time may call it."""

    def __init__(self, transport: Any, device: torch.device) -> None:
        """`transport` is a process group of torch's, or anything with its `allreduce` and `gather`."""
        self._transport = transport
        self._device = device
        self.rank: int = transport.rank()
        self.ranks: int = transport.size()
        self._left: list[Exchange] = []
        """Of the step that runs, the next one last."""
        self._lost: str | None = None

    @classmethod
    def join(cls, meeting: Path, rank: int, ranks: int, device: torch.device, patience_s: float) -> Group:
        """Meet the other ranks over a file that all of them name: by NCCL where each has its own GPU, else by Gloo.

        Gloo listens on the loopback alone. Whoever isn't met in an exchange within `patience_s` is lost.
        """
        store = distributed.FileStore(str(meeting), ranks)
        timeout = timedelta(seconds=max(patience_s, MEETING_S))
        if device.type == "cuda":
            return cls(_nccl(store, rank, ranks, timedelta(seconds=patience_s)), device)
        options: Any = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timeout
        transport = distributed.ProcessGroupGloo(store, rank, ranks, options)
        transport._set_default_timeout(timedelta(seconds=patience_s))
        return cls(transport, device)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @contextmanager
    def step(self, exchanges: Sequence[Exchange]) -> Iterator[None]:
        """A step in which these exchanges are made. Whatever is raised in it, the other ranks get to its end.

        Raises `RankLost`, now and ever after, if they don't.
        """
        if self._lost is not None:
            raise RankLost(self._lost)
        self._left = list(reversed(exchanges))
        try:
            yield
        except RankLost:
            raise
        except BaseException:
            self._settle()
            raise
        if self._left:
            self._settle()
            raise AssertionError("a step made fewer exchanges than it should")

    def add(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in its place."""
        self._expect(Exchange("sum", tuple(x.shape), x.dtype))
        with self._in_touch():
            self._transport.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """All ranks' x, in their order, on the first rank; nothing on the others."""
        self._expect(Exchange("gather", tuple(x.shape), x.dtype))
        options = distributed.GatherOptions()
        options.rootRank = 0
        found = [torch.empty_like(x) for _ in range(self.ranks)] if self.is_first else []
        with self._in_touch():
            self._transport.gather([found] if self.is_first else [], [x], options).wait()
        return found

    def abandon(self) -> None:
        """Let go of an exchange that will never end, where the transport can; from any thread."""
        with suppress(RuntimeError):
            self._transport.abort()

    def _expect(self, exchange: Exchange) -> None:
        if not self._left or self._left[-1] != exchange:
            raise AssertionError(f"{exchange} is not the step's next exchange: {self._left[-1:]}")
        self._left.pop()

    def _settle(self) -> None:
        """Take part in what is left of the step, with zeros."""
        while self._left:
            kind, shape, dtype = self._left[-1]
            try:
                zeros = torch.zeros(shape, dtype=dtype, device=self._device)
            except Exception as error:
                self._lost = f"rank {self.rank} can't end a step that failed: {error}"
                raise RankLost(self._lost) from error
            (self.add if kind == "sum" else self.gather)(zeros)

    @contextmanager
    def _in_touch(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._lost = f"rank {self.rank} lost touch with the others: {error}"
            raise RankLost(self._lost) from error


def _nccl(store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
    if not distributed.is_nccl_available():
        raise RuntimeError("tensor parallelism on GPUs takes a torch that was built with NCCL")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, ranks, options)
