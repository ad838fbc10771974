"""Stop strings, found wherever tokens happen to divide them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Stopped(NamedTuple):
    """What `StopMatcher.push` lets through, and the stop string that fired, if one did."""

    text: str
    stop: str | None


class _Pattern:
    """One stop string and how much of it the text so far ends with (Knuth, Morris and Pratt's automaton)."""

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = [0] * len(stop)
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._borders[length - 1]
            length += stop[i] == stop[length]
            self._borders[i] = length

    def ends(self, text: str) -> list[int]:
        """Advance over `text`; the ends in it of all complete matches."""
        stop, borders, matched = self.stop, self._borders, self.matched
        found = []
        for i, char in enumerate(text):
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                found.append(i + 1)
                matched = borders[-1]
        self.matched = matched
        return found


class StopMatcher:
    """Lets text through up to the first stop string, and holds back only what may still become one.

    The stop that is complete first fires; of two that end together, the longer. What is held is the
    longest end of the text that is a proper beginning of some stop. After a stop has fired the
    matcher is used up.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._include = include
        self._held = ""

    def push(self, text: str, armed: bool = True, fits: Callable[[str], bool] | None = None) -> Stopped:
        """Add text. While not `armed` a stop that is complete is ordinary text, but one may begin.

        `fits` says whether the text may end with what is let through; a stop that would cut it
        elsewhere is ordinary text too.
        """
        if not self._patterns:
            return Stopped(text, None)
        begun = [pattern for pattern in self._patterns if pattern.matched or pattern.stop[0] in text]
        if not begun:
            return Stopped(text, None)
        whole, before = self._held + text, len(self._held)
        matches = [(before + end, -len(p.stop), p.stop) for p in begun for end in p.ends(text)]
        for end, length, stop in sorted(matches) if armed else ():
            kept = whole[: end if self._include else end + length]
            if fits is None or fits(kept):
                self._held = ""
                return Stopped(kept, stop)
        held = max(pattern.matched for pattern in begun)
        self._held = whole[len(whole) - held :]
        return Stopped(whole[: len(whole) - held], None)

    def flush(self) -> str:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, ""
        return held
