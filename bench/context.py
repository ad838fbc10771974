"""What every part of the benchmark is given."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from bench.floors import Shape
from bench.limits import Limits, measure_limits
from bench.quiet import Quiet, wait_quiet
from bench.results import Part, Results, Sample, SideResult
from bench.roster import Model, Roster, chosen
from bench.side import Side, SideFailed, SideSpec
from bench.workload import FixedWork, Workload


@dataclass(slots=True)
class Bench:
    """The settings of a run, its work, its sides, and where its results go."""

    model: Model
    shape: Shape
    roster: Roster
    work: FixedWork
    results: Results
    rounds: int
    threads: int
    wanted: tuple[str, ...]
    """Beginnings of the names of the sides that take part; all if empty."""
    patience_s: float
    """How long to wait for a quiet machine."""
    quick: bool = False
    console: Console = field(default_factory=lambda: Console(highlight=False))

    @property
    def turns(self) -> range:
        """The rounds by number. Round -1 warms up and isn't counted; a quick run has none."""
        return range(0 if self.quick else -1, self.rounds)

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def chosen(self, specs: Sequence[SideSpec]) -> list[SideSpec]:
        return chosen(specs, self.wanted)

    def quiet(self) -> Quiet:
        """Wait for the others to leave the machine alone; say so if they don't."""
        found = wait_quiet(self.patience_s)
        if not found.is_quiet:
            self.say(f"  the machine is not quiet: {found.busy:.0%} busy after {found.waited_s:.0f} s")
        return found

    def facts(self, limits: Sequence[Limits] = (), **more: Any) -> dict[str, Any]:
        """What a part's numbers rest on."""
        known = {"machine": machine(), "threads": self.threads, **more}
        if limits:
            known |= {"limits": asdict(middle(limits)), "shape": asdict(self.shape)}
        return known

    def limits(self) -> Limits:
        self.quiet()
        found = measure_limits(self.threads)
        self.say(
            f"  limits: {found.read_bytes_per_s / 1e9:.0f} GB/s read, {found.bf16_ops_per_s / 1e9:.0f} bf16 and"
            f" {found.int8_ops_per_s / 1e9:.0f} int8 Gop/s"
        )
        return found


def spec_facts(side: Side) -> dict[str, Any]:
    """What a loaded side says of itself, and what it was given."""
    pool = {"kv_pool_bytes": side.spec.kv_pool_bytes} if side.spec.kv_pool_bytes else {}
    return {**side.facts, **pool, "precision": side.spec.precision, "weights_bytes": side.spec.weights_bytes}


def add_sample(part: Part, side: Side, sample: Sample, **facts: Any) -> None:
    """Put a round's sample to a side's result, which is made if this is the first."""
    result = part.sides.setdefault(side.spec.name, SideResult(side.spec.title, spec_facts(side)))
    result.facts.update(facts)
    result.samples.append(sample)


def run(side: Side, work: Workload) -> dict[str, Any]:
    """Let a side do the work, and verify that it did all of it."""
    answer: dict[str, Any] = side.ask("run", prompts=work.prompts, max_tokens=work.max_tokens)
    lengths = [len(output) for output in answer["outputs"]]
    if lengths != [work.max_tokens] * len(work.prompts):
        raise SideFailed(f"{side.spec.name} gave {lengths} tokens instead of {work.max_tokens} for each prompt")
    return answer


def middle(limits: Sequence[Limits]) -> Limits:
    """The median of each limit."""
    columns = {name: [asdict(one)[name] for one in limits] for name in asdict(limits[0])}
    return Limits(**{name: median(values) for name, values in columns.items()})


def machine() -> dict[str, str]:
    """What a reader has to know of the machine."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "machine": f"{cpu}, {os.cpu_count()} logical processors",
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": version("torch"),
    }
