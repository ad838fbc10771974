"""From the start of the process to the first token, on a warm disk."""

from __future__ import annotations

import time

from bench.context import Bench, add_sample, run
from bench.results import Part
from bench.side import SideFailed, Sides, SideSpec
from bench.workload import Workload


def measure(bench: Bench) -> None:
    """Start each side anew in each round. A first start, which fills caches on disk and in memory, isn't counted."""
    specs = bench.chosen(bench.roster.servers())
    part = Part()
    failed: dict[str, str] = {}
    for number in bench.turns:
        for spec in specs:
            if spec.name in failed:
                continue
            try:
                _start(bench, spec, part, counts=number >= 0)
            except SideFailed as failure:
                failed[spec.name] = str(failure)
                bench.say(f"  left out: {failure}")
    part.facts = bench.facts(prompt_tokens=len(bench.work.w3.prompts[0]), failed=failed)
    bench.results.record("start", part)


def _start(bench: Bench, spec: SideSpec, part: Part, *, counts: bool) -> None:
    quiet = bench.quiet()
    with Sides([spec]) as sides:
        began_s = time.perf_counter()
        with sides.turn(spec.name) as side:
            loaded_s = time.perf_counter() - began_s
            run(side, Workload(bench.work.w3.prompts[:1], 1))
            first_token_s = time.perf_counter() - began_s
            if counts:
                sample = {"first_token_s": first_token_s, "loaded_s": loaded_s, "busy": quiet.busy}
                add_sample(part, side, sample)
    bench.say(f"  start {spec.name:>24} {first_token_s:8.2f} s{'' if counts else ' (not counted)'}")
