"""What a check has to say."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report. `advice` says what to do, unless all is well."""

    area: str
    level: Level
    message: str
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Reporter:
    """Makes findings of one area."""

    area: str

    def ok(self, message: str) -> Finding:
        return Finding(self.area, Level.OK, message)

    def warn(self, message: str, advice: str) -> Finding:
        return Finding(self.area, Level.WARN, message, advice)

    def fail(self, message: str, advice: str) -> Finding:
        return Finding(self.area, Level.FAIL, message, advice)
