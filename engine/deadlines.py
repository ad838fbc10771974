"""Moments after which requests aren't wanted any more. No torch here."""

from __future__ import annotations

import heapq


class Deadlines:
    """Deadlines by request, the next one first."""

    def __init__(self) -> None:
        self._at_s: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def add(self, request_id: str, at_s: float) -> None:
        self._at_s[request_id] = at_s
        heapq.heappush(self._heap, (at_s, request_id))

    def discard(self, request_id: str) -> None:
        """Forget the deadline of a request, if it has one."""
        if self._at_s.pop(request_id, None) is not None and len(self._heap) > 2 * len(self._at_s) + 16:
            self._heap = [(at_s, name) for name, at_s in self._at_s.items()]
            heapq.heapify(self._heap)

    @property
    def next_s(self) -> float | None:
        """The moment of the next deadline."""
        while self._heap and self._at_s.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def passed(self, now_s: float) -> list[str]:
        """The requests whose deadline has passed; they are forgotten."""
        passed = []
        while (next_s := self.next_s) is not None and next_s <= now_s:
            request_id = heapq.heappop(self._heap)[1]
            if self._at_s.pop(request_id, None) is not None:
                passed.append(request_id)
        return passed

    def clear(self) -> None:
        self._at_s.clear()
        self._heap.clear()

    def __len__(self) -> int:
        return len(self._at_s)
