"""Requests that wait for a slot: classes of priority, each in order of arrival. No torch here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine.sequence import TokenSequence


class WaitingQueue:
    """Ends in constant time, removal from the middle too."""

    def __init__(self) -> None:
        self._classes: dict[int, OrderedDict[int, TokenSequence]] = {}
        self._priorities: list[int] = []

    def push(self, sequence: TokenSequence) -> None:
        """Behind all others of its class."""
        self._class(sequence.priority)[sequence.arrival] = sequence

    def push_front(self, sequence: TokenSequence) -> None:
        """Before all others of its class."""
        members = self._class(sequence.priority)
        members[sequence.arrival] = sequence
        members.move_to_end(sequence.arrival, last=False)

    def first(self) -> TokenSequence | None:
        """Who is next, or None."""
        return next(iter(self), None)

    def remove(self, sequence: TokenSequence) -> None:
        members = self._classes[sequence.priority]
        del members[sequence.arrival]
        if not members:
            del self._classes[sequence.priority]
            self._priorities.remove(sequence.priority)

    def _class(self, priority: int) -> OrderedDict[int, TokenSequence]:
        if priority not in self._classes:
            self._classes[priority] = OrderedDict()
            self._priorities = sorted(self._classes)
        return self._classes[priority]

    def __iter__(self) -> Iterator[TokenSequence]:
        for priority in self._priorities:
            yield from self._classes[priority].values()

    def __len__(self) -> int:
        return sum(len(members) for members in self._classes.values())

    def __contains__(self, sequence: TokenSequence) -> bool:
        return sequence.arrival in self._classes.get(sequence.priority, ())
