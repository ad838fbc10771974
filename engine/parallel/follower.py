"""A rank's own process: `python -m engine.parallel.follower PARENT_PID CALLS_FD RANK`. `ranks.Ranks` starts it.

It does what it is called to do until the calls end. Nobody's signal but SIGKILL ends it before: a terminal and a
service manager signal all processes, and the first rank alone knows whether there is still work.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from engine.executor import is_out_of_memory
from engine.memory import Move
from engine.model.openmp import wait_briefly
from engine.parallel.ranks import Answer, RankLost

if TYPE_CHECKING:
    from pathlib import Path

    from engine.batch import Batch
    from engine.config import EngineConfig
    from engine.memory.machine import DeviceMemory
    from engine.memory.storage import KVStorage
    from engine.parallel.group import Group
    from engine.runner import TorchModel
    from kernels.kv import KVLayout, Thinning

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Follower:
    """One rank's part of the model; its methods are what the first rank calls."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._group: Group | None = None
        self._model: TorchModel | None = None
        self._storage: KVStorage | None = None
        self._saved: dict[int, Any] = {}

    def join(self, meeting: Path, ranks: int, device: str, patience_s: float) -> None:
        """Meet the others."""
        import torch

        from engine.parallel.group import Group

        place = torch.device(device)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        self._group = Group.join(meeting, self._rank, ranks, place, patience_s)

    def load(self, config: EngineConfig) -> str:
        """The revision of what was loaded."""
        from engine.runner import TorchModel

        self._model = TorchModel.load(config, group=self._group)
        return self._model.info.revision

    def memory(self) -> DeviceMemory:
        return self._loaded.memory()

    def take_peak_bytes(self) -> int:
        return self._loaded.take_peak_bytes()

    def allocate_kv(self, layout: KVLayout, units: int, most_units: int) -> None:
        self._storage = self._loaded.allocate_kv(layout, units, most_units)

    def release_kv(self) -> None:
        self._storage = None
        self._loaded.release_kv()

    def sleep(self) -> None:
        self._loaded.sleep()

    def wake(self) -> None:
        self._loaded.wake()

    def execute(self, batch: Batch, forgotten: list[int]) -> None:
        """Take part in a step, and give up what was saved under these numbers."""
        for number in forgotten:
            self._saved.pop(number, None)
        self._loaded.execute(batch)

    def thin(self, work: Thinning) -> None:
        self._loaded.thin(work)

    def copy_pages(self, moves: list[Move]) -> None:
        self._kv.copy_pages(moves)

    def save_pages(self, number: int, pages: list[int]) -> None:
        """Keep a copy of the pages under a number."""
        self._saved[number] = self._kv.save_pages(pages)

    def load_pages(self, number: int, first: int, pages: list[int]) -> None:
        """Put what was saved, from its page `first` on, into so many pages."""
        self._kv.load_pages(self._saved[number][first:], pages)

    def decommit(self, runs: list[tuple[int, int]]) -> None:
        self._kv.decommit(runs)

    @property
    def _loaded(self) -> TorchModel:
        if self._model is None:
            raise RuntimeError("no model is loaded")
        return self._model

    @property
    def _kv(self) -> KVStorage:
        if self._storage is None:
            raise RuntimeError("no KV storage is allocated")
        return self._storage


def serve(calls: Connection, rank: int) -> None:
    """Answer calls until there are no more, or the other ranks are out of reach.

    Whoever leaves lets go of those that wait for it, so that a loss goes round at once.
    """
    import torch  # noqa: F401  # takes seconds, which the others would wait for it in their first meeting

    follower = Follower(rank)
    calls.send(Answer())
    while True:
        try:
            name, arguments = calls.recv()
        except (EOFError, OSError):
            return
        try:
            answer = Answer(getattr(follower, name)(*arguments))
        except Exception as error:
            short = is_out_of_memory(error)
            log.log(logging.INFO if short else logging.ERROR, "%s failed", name, exc_info=error)
            lost = isinstance(error, RankLost)
            answer = Answer(error=f"{type(error).__name__}: {error}", short_of_memory=short, lost=lost)
        try:
            calls.send(answer)
        except OSError:
            return
        if answer.lost:
            return


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the one that started it ends, and leave if it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the first rank has ended")


def main() -> None:
    parent, calls, rank = map(int, sys.argv[1:])
    die_with(parent)
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format=f"rank {rank}: %(levelname)s %(message)s", level=logging.WARNING)
    wait_briefly()
    serve(Connection(calls), rank)
    logging.shutdown()
    os._exit(0)  # nothing is left to be said; torch's threads may still wait for other ranks


if __name__ == "__main__":
    main()
