"""The benchmark's result: numbers for programs, a page for people."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

SIDES = ("naive", "headrace")


@dataclass(frozen=True, slots=True)
class Round:
    """One side's run over one round's jobs, from the first submission to the last result."""

    side: str
    jobs: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    batch_sizes: tuple[float, ...] = ()
    """For Headrace: each job's mean batch size."""

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Report:
    """All rounds, and what they ran on."""

    rounds: list[Round]
    jobs: int
    max_tokens: int
    setting: dict[str, str]
    sides: dict[str, dict[str, Any]] = field(default_factory=dict)

    def rates(self, side: str) -> list[float]:
        """Output tokens a second, round by round."""
        return [one.tokens_per_second for one in self.rounds if one.side == side]

    @property
    def ratio(self) -> float:
        return median(self.rates("headrace")) / median(self.rates("naive"))

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "results.json").write_text(json.dumps(self.as_json(), indent=2) + "\n")
        (directory / "RESULTS.md").write_text(self.as_markdown())

    def as_json(self) -> dict[str, Any]:
        return {
            "jobs": self.jobs,
            "max_tokens": self.max_tokens,
            "ratio": round(self.ratio, 2),
            "median_tokens_per_second": {side: round(median(self.rates(side)), 1) for side in SIDES},
            "setting": self.setting,
            "sides": self.sides,
            "rounds": [asdict(one) | {"tokens_per_second": round(one.tokens_per_second, 1)} for one in self.rounds],
        }

    def as_markdown(self) -> str:
        naive, headrace = median(self.rates("naive")), median(self.rates("headrace"))
        naive_jobs = next(one.jobs for one in self.rounds if one.side == "naive")
        sizes = [size for one in self.rounds for size in one.batch_sizes]
        lines = [
            "# Headrace against the worker that people write today",
            "",
            f"**{self.ratio:.1f} times the throughput**: {headrace:.0f} against {naive:.0f} tokens a second.",
            "",
            f"{self.jobs} jobs with prompts of 32 to 256 tokens, {self.max_tokens} new tokens each, greedy, "
            "end of text ignored, all submitted at once through a real queue; the time runs from the first submission "
            "to the last result. Both sides run side by side on one machine and take turns; a round's prompts are new "
            "to both.",
            "",
            "| | median tokens/s | lowest | highest | all jobs take | rounds |",
            "|---|---|---|---|---|---|",
            self._row("Celery and `transformers`, one job at a time", "naive"),
            self._row("Headrace", "headrace"),
            "",
            f"The naive worker is slow, so each round gives it {naive_jobs} of the jobs, evenly spaced in length, and "
            "its own rate says how long all would take.",
            "",
        ]
        if sizes:
            lines += [
                f"Headrace's jobs ran in batches of {median(sizes):.0f} on average (largest {max(sizes):.0f}).",
                "",
            ]
        lines += ["| | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in self.setting.items()]
        for side, facts in self.sides.items():
            lines.append(f"| {side} | " + ", ".join(f"{name} {value}" for name, value in facts.items()) + " |")
        lines += ["", "Made by `make bench`; every round is in `results.json`.", ""]
        return "\n".join(lines)

    def _row(self, title: str, side: str) -> str:
        rates = self.rates(side)
        whole_s = self.jobs * self.max_tokens / median(rates)
        return (
            f"| {title} | {median(rates):.1f} | {min(rates):.1f} | {max(rates):.1f} | {whole_s:.1f} s | {len(rates)} |"
        )
