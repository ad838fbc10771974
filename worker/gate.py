"""Who may be in the engine: many jobs together, or one that has to be alone.

A job's last attempt, after its others were lost with their workers, runs alone: if it is what kills
them, it takes no other job along, and if it is not, it ends. Jobs that come meanwhile wait here, not
yet claimed, so that they have nothing to lose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.slot import Slot

Enter = Callable[[None], None]


class Gate:
    """Used on the hub thread only. Whoever has to be alone waits for those inside, but not for more of them."""

    def __init__(self) -> None:
        self._inside: set[Slot] = set()
        self._waiting: deque[tuple[Slot, Enter]] = deque()
        self._alone: deque[tuple[Slot, Enter]] = deque()
        """Those that have to be alone and wait for it."""
        self._lone: Slot | None = None

    @property
    def closed(self) -> bool:
        """Whether jobs that may have company have to wait: it is of no use to take more of them."""
        return self._lone is not None or bool(self._alone)

    def enter(self, slot: Slot, done: Enter) -> None:
        """Call `done` once the job may be in the engine beside others."""
        if self.closed:
            self._waiting.append((slot, done))
        else:
            self._inside.add(slot)
            done(None)

    def enter_alone(self, slot: Slot, done: Enter) -> None:
        """Call `done` once nobody else is inside, and let nobody in until the job has left."""
        self._alone.append((slot, done))
        self._open()

    def holds(self, slot: Slot) -> bool:
        """Whether the job is inside."""
        return slot in self._inside or slot is self._lone

    def wake(self, slot: Slot) -> None:
        """Let a job that waits go on without entering: it has been stopped."""
        for _, done in self._withdrawn(slot):
            done(None)
        self._open()

    def leave(self, slot: Slot) -> None:
        """The job is done with the engine. Those that waited while one was alone go before the next such one."""
        self._inside.discard(slot)
        self._withdrawn(slot)
        if slot is self._lone:
            self._lone = None
            self._admit()
        self._open()

    def _withdrawn(self, slot: Slot) -> list[tuple[Slot, Enter]]:
        """Take the job out of the lines it stands in."""
        found = []
        for line in (self._waiting, self._alone):
            found += (entries := [entry for entry in line if entry[0] is slot])
            for entry in entries:
                line.remove(entry)
        return found

    def _admit(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for slot, done in waiting:
            self._inside.add(slot)
            done(None)

    def _open(self) -> None:
        if self._lone is None and not self._inside and self._alone:
            self._lone, done = self._alone.popleft()
            done(None)
        elif not self.closed:
            self._admit()
