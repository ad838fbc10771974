"""Requests that arrive at random moments at a given rate: how long until the first token, how long between tokens."""

from __future__ import annotations

import random

from bench.context import Bench, add_sample
from bench.percentiles import first_token_ms, gaps_ms, percentile
from bench.results import Part
from bench.side import Side, SideFailed, Sides
from bench.sides.protocol import Arrival, Played

RATES = (1.0, 2.0, 4.0, 6.0)
"""Requests a second."""
REQUESTS = 64
NEW_TOKENS = 64
SEED = 7


def measure(bench: Bench) -> None:
    """Each rate once for each side: a run's percentiles are over many requests, so one run says enough."""
    part = Part()
    rates = RATES[:1] if bench.quick else RATES
    with Sides(bench.chosen(bench.roster.servers())) as sides:
        for number, rate in enumerate((rates[0], *rates)):
            warm = number == 0
            arrivals = poisson(bench, rate, 4 if warm or bench.quick else REQUESTS)
            for name in sides.names:
                quiet = bench.quiet()
                try:
                    with sides.turn(name) as side:
                        sample = _play(side, arrivals) | {"rate": rate, "busy": quiet.busy}
                        if not warm:
                            add_sample(part, side, sample)
                except SideFailed as failure:
                    bench.say(f"  left out: {failure}")
                else:
                    bench.say(
                        f"  online {name:>24} {rate:4.1f} requests/s: first token {sample['first_token_p50_ms']:.0f} ms"
                        f" (p99 {sample['first_token_p99_ms']:.0f}), between {sample['itl_p50_ms']:.1f}"
                        f" (p99 {sample['itl_p99_ms']:.1f})"
                    )
    part.facts = bench.facts(requests=4 if bench.quick else REQUESTS, max_tokens=NEW_TOKENS, failed=sides.failed)
    bench.results.record("online", part)


def poisson(bench: Bench, rate: float, requests: int) -> list[Arrival]:
    """The same arrivals for every side."""
    draw = random.Random(SEED)
    arrivals: list[Arrival] = []
    at_s = 0.0
    for number in range(requests):
        prompt = list(bench.work.w1.prompts[number % len(bench.work.w1.prompts)])
        arrivals.append({"at_s": at_s, "prompt": prompt, "max_tokens": NEW_TOKENS, "awaited": True})
        at_s += draw.expovariate(rate)
    return arrivals


def _play(side: Side, arrivals: list[Arrival]) -> dict[str, float]:
    played: list[Played] = side.ask("play", arrivals=arrivals)
    short = [len(one["token_s"]) for one in played if len(one["token_s"]) != NEW_TOKENS]
    if short:
        raise SideFailed(f"{side.spec.name} gave {short} tokens instead of {NEW_TOKENS}")
    firsts, gaps = first_token_ms(played), gaps_ms(played)
    ended_s = max(one["token_s"][-1] for one in played)
    return {
        "first_token_p50_ms": percentile(firsts, 0.5),
        "first_token_p99_ms": percentile(firsts, 0.99),
        "itl_p50_ms": percentile(gaps, 0.5),
        "itl_p99_ms": percentile(gaps, 0.99),
        "tokens_per_s": len(played) * NEW_TOKENS / ended_s,
    }
