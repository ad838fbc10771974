"""Waiting until nothing else runs on the machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
IDLE, IOWAIT, STEAL = 3, 4, 7
"""Fields of the first line of `/proc/stat`, after the word `cpu`."""
SAMPLE_S = 0.5
MOST_BUSY = 0.08
"""Share of all processors that others may use."""
PATIENCE_S = 90.0


@dataclass(frozen=True, slots=True)
class Quiet:
    """How quiet it was just before a measurement: shares of all processors' time."""

    busy: float
    steal: float
    """Taken by the host of this virtual machine."""
    waited_s: float

    @property
    def is_quiet(self) -> bool:
        return self.busy <= MOST_BUSY


def wait_quiet(patience_s: float = PATIENCE_S) -> Quiet:
    """Wait for a quiet half second; after `patience_s` take what there is."""
    began_s = time.monotonic()
    while True:
        busy, steal = _shares()
        found = Quiet(busy, steal, time.monotonic() - began_s)
        if found.is_quiet or found.waited_s >= patience_s:
            return found


def _shares() -> tuple[float, float]:
    if not STAT.exists():
        return 0.0, 0.0
    before = _ticks()
    time.sleep(SAMPLE_S)
    spent = [now - then for now, then in zip(_ticks(), before, strict=True)]
    total = max(1, sum(spent))
    return 1 - (spent[IDLE] + spent[IOWAIT]) / total, spent[STEAL] / total


def _ticks() -> list[int]:
    with STAT.open() as lines:
        return [int(field) for field in lines.readline().split()[1:]]
