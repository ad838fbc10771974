"""What was measured, part by part, in `results.json`. A part that isn't run again stays as it was."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench.ratios import BOUNDS, RATIOS, Bound, Ratio, times_better

Sample = dict[str, float]


@dataclass(slots=True)
class SideResult:
    """One side's samples in one part, and what it ran with."""

    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    """`versions` and `settings`, and what else a reader of the numbers should know."""
    samples: list[Sample] = field(default_factory=list)
    """One for each round."""


@dataclass(slots=True)
class Part:
    """One run of one part."""

    facts: dict[str, Any] = field(default_factory=dict)
    """The machine, its limits, the work."""
    sides: dict[str, SideResult] = field(default_factory=dict)


class Results:
    """The contents of a directory's `results.json`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run = uuid.uuid4().hex[:8]
        path = directory / "results.json"
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.data.setdefault("parts", {})

    def record(self, name: str, part: Part) -> None:
        """Put a part in the place of the old one, and recompute the ratios and bounds of what was measured now.

        Sides that took no part this time keep their old record.
        """
        when = datetime.now(UTC).isoformat(timespec="seconds")
        sides = dict(self.data["parts"].get(name, {}).get("sides", {}))
        for side, result in part.sides.items():
            record = {"title": result.title, "run": self.run, "measured": when, **result.facts}
            sides[side] = record | {"samples": result.samples}
        self.data["parts"][name] = {**part.facts, "measured": when, "sides": sides}
        for ratio in RATIOS:
            if ratio.part == name and (entry := self._entry(ratio, part)) is not None:
                self.data[ratio.key] = entry | {"measured": when}
        for bound in BOUNDS:
            if bound.part == name and (entry := self._bounded(bound, part)) is not None:
                self.data[bound.key] = entry | {"measured": when}
        self.save()

    def _entry(self, ratio: Ratio, part: Part) -> dict[str, Any] | None:
        ours = [side for side in ratio.ours if side in part.sides]
        if not ours or ratio.theirs not in part.sides:
            return None
        theirs = _values(part.sides[ratio.theirs], ratio.metric)
        best = max(ours, key=lambda side: times_better(ratio, _middle(part, side, ratio), median(theirs)))
        mine = _values(part.sides[best], ratio.metric)
        pairs = zip(mine, theirs, strict=False)
        sides = {"headrace": (best, mine), "peer": (ratio.theirs, theirs)}
        return {
            "ratio": round(times_better(ratio, median(mine), median(theirs)), 3),
            "at_least": ratio.at_least,
            "what": ratio.what,
            "metric": ratio.metric,
            "higher_is_better": ratio.higher_is_better,
            "rounds": min(len(mine), len(theirs)),
            "round_ratios": [round(times_better(ratio, one, other), 3) for one, other in pairs],
            **{
                role: {
                    "side": side,
                    "median": median(values),
                    "lowest": min(values),
                    "highest": max(values),
                    **{name: part.sides[side].facts.get(name, {}) for name in ("versions", "settings")},
                }
                for role, (side, values) in sides.items()
            },
            "machine": part.facts.get("machine", {}),
            "limits": part.facts.get("limits", {}),
        }

    def _bounded(self, bound: Bound, part: Part) -> dict[str, Any] | None:
        ours = {side: _values(part.sides[side], bound.metric) for side in bound.ours if side in part.sides}
        if not ours:
            return None
        best, *_ = sorted(ours, key=lambda side: median(ours[side]), reverse=bound.higher_is_better)
        values = ours[best]
        return {
            "value": median(values),
            "at_least" if bound.higher_is_better else "at_most": bound.limit,
            "what": bound.what,
            "metric": bound.metric,
            "higher_is_better": bound.higher_is_better,
            "rounds": len(values),
            "round_values": values,
            "side": best,
            "lowest": min(values),
            "highest": max(values),
            **{name: part.sides[best].facts.get(name, {}) for name in ("versions", "settings")},
            "machine": part.facts.get("machine", {}),
        }

    def save(self) -> None:
        """Write both files, each in one step."""
        from bench.report import page

        self.directory.mkdir(parents=True, exist_ok=True)
        known = [*(ratio.key for ratio in RATIOS), *(bound.key for bound in BOUNDS)]
        data = {key: self.data[key] for key in known if key in self.data} | {"parts": self.data["parts"]}
        _write(self.directory / "results.json", json.dumps(data, indent=1) + "\n")
        _write(self.directory / "RESULTS.md", page(data))


def _middle(part: Part, side: str, ratio: Ratio) -> float:
    return median(_values(part.sides[side], ratio.metric))


def _values(side: SideResult, metric: str) -> list[float]:
    return [sample[metric] for sample in side.samples]


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".new")
    part.write_text(text)
    part.replace(path)
