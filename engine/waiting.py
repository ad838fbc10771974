"""Requests that wait for a slot, and who of them is next. No torch here."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from engine.fairness import FairShare
from engine.sequence import TokenSequence

Key = tuple[int, bool, float, int]
_arrival = attrgetter("arrival")


class WaitingQueue:
    """Classes of priority; within one, the tenants take turns by their share, each in order of arrival.

    Who was preempted stands before all others of its class. Whoever waits rises by one class each
    time `aging_s` has passed, and keeps the class (`TokenSequence.level`) while it runs.
    """

    def __init__(self, shares: FairShare, aging_s: float = math.inf) -> None:
        self._shares = shares
        self._aging_s = aging_s
        self._lines: dict[tuple[int, str], list[TokenSequence]] = {}
        """By priority and tenant; the first of a line has waited longest, so no other of it can be before it."""
        self._returning: dict[int, TokenSequence] = {}
        """Who was preempted, by arrival."""
        self._classes: Counter[int] = Counter()

    def push(self, sequence: TokenSequence, now_s: float) -> None:
        """Let a new request wait."""
        sequence.waits_since_s = now_s
        line = self._lines.setdefault((sequence.priority, sequence.tenant), [])
        insort(line, sequence, key=_arrival)
        self._shares.enter(sequence.tenant)
        self._classes[sequence.priority] += 1

    def push_front(self, sequence: TokenSequence, now_s: float) -> None:
        """Let a preempted request wait, before all others of its class."""
        sequence.waits_since_s = now_s
        self._returning[sequence.arrival] = sequence
        self._classes[sequence.priority] += 1

    def remove(self, sequence: TokenSequence) -> None:
        if self._returning.pop(sequence.arrival, None) is None:
            key = sequence.priority, sequence.tenant
            line = self._lines[key]
            del line[self._find(line, sequence)]
            if not line:
                del self._lines[key]
            self._shares.leave(sequence.tenant)
        self._classes[sequence.priority] -= 1
        if not self._classes[sequence.priority]:
            del self._classes[sequence.priority]

    def in_order(self, now_s: float, priority: int | None = None) -> Iterator[TokenSequence]:
        """Who is next, and after that; of one priority only if it is given.

        The caller may remove what it was given, and charge its tenant, before it asks for the next.
        """
        lines = [line for (of, _), line in self._lines.items() if priority in (None, of)]
        lines += [[sequence] for sequence in self._returning.values() if priority in (None, sequence.priority)]
        heads = [(self._key(line[0], now_s), line[0], line) for line in lines]
        heapq.heapify(heads)
        while heads:
            key, sequence, line = heads[0]
            now_key = self._key(sequence, now_s)
            if now_key != key:  # its tenant was charged meanwhile
                heapq.heapreplace(heads, (now_key, sequence, line))
                continue
            yield sequence
            following = bisect_right(line, sequence.arrival, key=_arrival)
            if following < len(line):
                heapq.heapreplace(heads, (self._key(line[following], now_s), line[following], line))
            else:
                heapq.heappop(heads)

    def level(self, sequence: TokenSequence, now_s: float) -> int:
        """The class that a waiting request has risen to."""
        return sequence.level - int((now_s - sequence.waits_since_s) / self._aging_s)

    @property
    def most_urgent(self) -> int | None:
        """The lowest priority number of those who wait, as they came."""
        return min(self._classes, default=None)

    @property
    def oldest_s(self) -> float:
        """The moment since which the one that waits longest does; infinite if nobody waits."""
        new = min((line[0].waits_since_s for line in self._lines.values()), default=math.inf)
        return min(new, min((s.waits_since_s for s in self._returning.values()), default=math.inf))

    @property
    def returning(self) -> int:
        """How many were preempted."""
        return len(self._returning)

    def by_priority(self) -> dict[int, int]:
        """How many wait, by the priority that they came with."""
        return dict(self._classes)

    def check(self) -> None:
        """Raise AssertionError if the counts and the lines don't agree."""
        members = list(self)
        assert Counter(s.priority for s in members) == self._classes, "the classes' counts are wrong"
        assert len({s.arrival for s in members}) == len(members), "a request waits twice"
        for (priority, tenant), line in self._lines.items():
            assert line, "an empty line is kept"
            assert [s.arrival for s in line] == sorted(s.arrival for s in line), "a line is out of order"
            assert all((s.priority, s.tenant) == (priority, tenant) for s in line), "a request waits in another's line"
        assert all(not s.pages and not s.computed for s in members), "a waiting request holds KV"

    def _key(self, sequence: TokenSequence, now_s: float) -> Key:
        level = self.level(sequence, now_s)
        if sequence.arrival in self._returning:
            return level, False, 0.0, sequence.arrival
        return level, True, self._shares.time(sequence.tenant), sequence.arrival

    def _find(self, line: list[TokenSequence], sequence: TokenSequence) -> int:
        at = bisect_left(line, sequence.arrival, key=_arrival)
        if at == len(line) or line[at] is not sequence:
            raise ValueError(f"request {sequence.id} doesn't wait")
        return at

    def __iter__(self) -> Iterator[TokenSequence]:
        for line in self._lines.values():
            yield from line
        yield from self._returning.values()

    def __len__(self) -> int:
        return self._classes.total()

    def __contains__(self, sequence: TokenSequence) -> bool:
        if sequence.arrival in self._returning:
            return True
        line = self._lines.get((sequence.priority, sequence.tenant), [])
        at = bisect_left(line, sequence.arrival, key=_arrival)
        return at < len(line) and line[at] is sequence
