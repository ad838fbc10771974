"""What running requests notice of long prompts that arrive: with the cap on a step's share for prompts, and without."""

from __future__ import annotations

from bench.context import Bench, add_sample
from bench.percentiles import first_token_ms, gaps_ms, percentile
from bench.results import Part
from bench.side import Side, SideFailed, Sides
from bench.sides.protocol import Arrival, Played

STEADY = 16
"""Requests that decode all the while."""
STEADY_PROMPT_TOKENS = 64
LONG_PROMPT_TOKENS = 1536
QUICK_PROMPT_TOKENS = 256
LONG_OUTPUT_TOKENS = 8
LONG_PROMPTS = 8
FIRST_LONG_S = 1.0
LONG_INTERVAL_S = 0.5
MAX_SEQ_TOKENS = 4096
CAPPED_SHARE = 0.25


def measure(bench: Bench) -> None:
    """Both settings take turns in every round."""
    specs = bench.chosen(
        [
            bench.roster.headrace("bf16", suffix, prefill_share=share, max_seq_len=MAX_SEQ_TOKENS)
            for suffix, share in (("-capped", CAPPED_SHARE), ("-uncapped", 1.0))
        ]
    )
    long_tokens = QUICK_PROMPT_TOKENS if bench.quick else LONG_PROMPT_TOKENS
    arrivals = _arrivals(bench, long_tokens)
    part = Part()
    with Sides(specs) as sides:
        for number in bench.turns:
            for name in sides.names:
                quiet = bench.quiet()
                try:
                    with sides.turn(name) as side:
                        sample = _play(side, arrivals)
                        if number >= 0:
                            add_sample(part, side, sample | {"busy": quiet.busy})
                except SideFailed as failure:
                    bench.say(f"  left out: {failure}")
                else:
                    bench.say(f"  stall {name:>24} p99 {sample['itl_p99_ms']:8.1f} ms between tokens")
    part.facts = bench.facts(
        steady=STEADY,
        long_prompts=len(arrivals) - STEADY,
        long_prompt_tokens=long_tokens,
        failed=sides.failed,
    )
    bench.results.record("stall", part)


def _arrivals(bench: Bench, long_tokens: int) -> list[Arrival]:
    text = [token for prompt in bench.work.w1.prompts for token in prompt] * 8
    room = MAX_SEQ_TOKENS - STEADY_PROMPT_TOKENS - 1
    steady: list[Arrival] = [
        {"at_s": 0.0, "prompt": _piece(text, number, STEADY_PROMPT_TOKENS), "max_tokens": room, "awaited": False}
        for number in range(STEADY)
    ]
    long: list[Arrival] = [
        {
            "at_s": FIRST_LONG_S + number * LONG_INTERVAL_S,
            "prompt": _piece(text, number, long_tokens),
            "max_tokens": LONG_OUTPUT_TOKENS,
            "awaited": True,
        }
        for number in range(2 if bench.quick else LONG_PROMPTS)
    ]
    return [*steady, *long]


def _piece(text: list[int], number: int, length: int) -> list[int]:
    """Text that begins differently for each number: prompts share no prefix."""
    return text[number * 17 : number * 17 + length]


def _play(side: Side, arrivals: list[Arrival]) -> dict[str, float]:
    played: list[Played] = side.ask("play", arrivals=arrivals)
    steady, long = played[:STEADY], played[STEADY:]
    gaps = gaps_ms(steady, from_s=FIRST_LONG_S, until_s=max(one["token_s"][0] for one in long))
    return {
        "itl_p50_ms": percentile(gaps, 0.5),
        "itl_p99_ms": percentile(gaps, 0.99),
        "itl_max_ms": max(gaps),
        "long_first_token_ms": percentile(first_token_ms(long), 0.5),
    }
