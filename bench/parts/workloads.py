"""W1, W2 and W3: the fixed workloads, every side in turn in every round."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from bench.context import Bench, add_sample, run
from bench.limits import Limits
from bench.results import Part
from bench.side import Side, SideFailed, Sides
from bench.workload import Workload

REFERENCE = "headrace-bf16"
"""Whose greedy tokens the others' are compared with."""


def measure(bench: Bench, names: Sequence[str] = ("w1", "w2", "w3")) -> None:
    """Load the sides once, then let them take turns: A B C A B C."""
    takers = {
        "w1": [spec.name for spec in bench.chosen(bench.roster.throughput())],
        "w2": [spec.name for spec in bench.chosen(bench.roster.throughput())],
        "w3": [spec.name for spec in bench.chosen(bench.roster.latency())],
    }
    specs = {spec.name: spec for spec in bench.chosen([*bench.roster.throughput(), *bench.roster.latency()])}
    wanted = {side for name in names for side in takers[name]}
    parts = {name: Part() for name in names}
    limits: list[Limits] = []
    with Sides([spec for spec in specs.values() if spec.name in wanted]) as sides:
        for side_name in sides.names:
            _warm_up(bench, sides, side_name)
        outputs: dict[str, dict[tuple[int, ...], list[int]]] = {}
        for number in range(bench.rounds):
            limits.append(bench.limits())
            for name in names:
                for side_name in [side for side in takers[name] if side in sides.names]:
                    _take_turn(bench, sides, side_name, name, parts[name], outputs)
                bench.say(f"round {number + 1} of {bench.rounds}: {name} done")
    for name, part in parts.items():
        part.facts = bench.facts(limits, work=_described(bench, name), failed=sides.failed)
        bench.results.record(name, part)


def _warm_up(bench: Bench, sides: Sides, side_name: str) -> None:
    """An uncounted turn: whoever takes memory when it is first used has it by then, like those who take it at once."""
    bench.say(f"loading {side_name}")
    try:
        with sides.turn(side_name) as side:
            run(side, bench.work.w1.subset(side.spec.most_prompts or len(bench.work.w1.prompts)))
    except SideFailed as failure:
        bench.say(f"  left out: {failure}")


def _take_turn(
    bench: Bench,
    sides: Sides,
    side_name: str,
    name: str,
    part: Part,
    outputs: dict[str, dict[tuple[int, ...], list[int]]],
) -> None:
    quiet = bench.quiet()
    try:
        with sides.turn(side_name) as side:
            if name == "w3":
                sample, shown = _one_by_one(side, bench.work.w3), "ms_per_token"
                add_sample(part, side, sample | {"busy": quiet.busy, "steal": quiet.steal})
            else:
                work = bench.work.w1 if name == "w1" else bench.work.w2
                sample, shown = _together(side, work, part, outputs if name == "w1" else {}), "tokens_per_s"
                part.sides[side_name].samples[-1] |= {"busy": quiet.busy, "steal": quiet.steal}
    except SideFailed as failure:
        bench.say(f"  left out: {failure}")
    else:
        bench.say(f"  {name} {side_name:>24} {sample[shown]:10.2f} {shown}")


def _together(
    side: Side, work: Workload, part: Part, outputs: dict[str, dict[tuple[int, ...], list[int]]]
) -> dict[str, float]:
    """All prompts at once."""
    most = side.spec.most_prompts
    given = work if most is None or most >= len(work.prompts) else work.subset(most)
    answer = run(side, given)
    tokens = len(given.prompts) * given.max_tokens
    sample = {
        "tokens_per_s": tokens / answer["seconds"],
        "seconds": answer["seconds"] * len(work.prompts) / len(given.prompts),
        "peak_bytes": float(answer["peak_bytes"]),
    }
    facts: dict[str, object] = {"prompts": len(given.prompts)}
    outputs[side.spec.name] = dict(zip(given.prompts, answer["outputs"], strict=True))
    if REFERENCE in outputs and side.spec.name != REFERENCE:
        facts["agreement"] = agreement(outputs[REFERENCE], outputs[side.spec.name])
    add_sample(part, side, sample, **facts)
    return sample


def agreement(
    reference: dict[tuple[int, ...], list[int]], others: dict[tuple[int, ...], list[int]]
) -> dict[str, float]:
    """How far greedy outputs go together: the share of equal first tokens, of equal outputs, the mean equal beginning.

    Engines that round differently part at near-ties; engines that are broken part at once.
    """
    beginnings = [
        next(
            (at for at, (one, two) in enumerate(zip(reference[prompt], output, strict=True)) if one != two), len(output)
        )
        for prompt, output in others.items()
    ]
    longest = len(next(iter(others.values())))
    return {
        "first_token": fmean(beginning > 0 for beginning in beginnings),
        "whole_output": fmean(beginning == longest for beginning in beginnings),
        "equal_tokens": fmean(beginnings),
    }


def _one_by_one(side: Side, work: Workload) -> dict[str, float]:
    """Each prompt alone, once for one token and once for all: the difference is the time of the others."""
    firsts, wholes = [], []
    for prompt in work.prompts:
        firsts.append(run(side, Workload((prompt,), 1))["seconds"])
        wholes.append(run(side, Workload((prompt,), work.max_tokens))["seconds"])
    return {
        "first_token_ms": median(firsts) * 1e3,
        "ms_per_token": (median(wholes) - median(firsts)) / (work.max_tokens - 1) * 1e3,
    }


def _described(bench: Bench, name: str) -> dict[str, object]:
    work = {"w1": bench.work.w1, "w2": bench.work.w2, "w3": bench.work.w3}[name]
    lengths = [len(prompt) for prompt in work.prompts]
    shared = len(bench.work.w2_prefix) if name == "w2" else 0
    return {"prompt_tokens": lengths, "shared_tokens": shared, "max_tokens": work.max_tokens, "quick": bench.quick}
