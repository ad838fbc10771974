"""When there was a worker to do the work: what nobody could do isn't late."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime

Stay = tuple[float, float]
"""From and to, in Unix time."""
_READY = re.compile(r"^\[(\S+ \S+): \S+\] \S+ ready\.$", re.MULTILINE)


def ready_s(log: str) -> float | None:
    """When the worker of this log said for the first time that it consumes."""
    said = _READY.search(log)
    return datetime.strptime(said[1], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp() if said else None


def stays(from_s: float, to_s: float, away: Iterable[Stay]) -> Iterator[Stay]:
    """When it was there, of a worker that was away meanwhile."""
    for gone_s, back_s in sorted(away):
        if from_s < min(gone_s, to_s):
            yield from_s, min(gone_s, to_s)
        from_s = max(from_s, back_s)
    if from_s < to_s:
        yield from_s, to_s


def attended_s(there: Iterable[Stay], since_s: float, until_s: float) -> float:
    """For how long of that time at least one was there."""
    total_s = 0.0
    for from_s, to_s in sorted(there):
        from_s, to_s = max(from_s, since_s), min(to_s, until_s)
        if from_s < to_s:
            total_s += to_s - from_s
            since_s = to_s
    return total_s
