"""Counts in sentences."""

from __future__ import annotations


def counted(count: int, one: str, many: str | None = None) -> str:
    """`1 job`, `2 jobs`: a count with the noun, or the noun and its verb, that goes with it."""
    return f"{count} {one if count == 1 else many or one + 's'}"
