"""Ten million tokens, or as many as are asked for, through the real engine; ends with 1 if anything grew.

    python -m bench.endurance [--tokens 10000000] [--seed 0]

The model is small and random, so that the engine has more to do than the arithmetic. Tokens are drawn from it by every
kind of sampling and under grammars, while requests are dropped, prompts refused, steps raise, memory is short,
callbacks fail, and the KV memory shrinks, grows, sleeps and wakes.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

from bench.endurance.growth import Bounds, Growth
from bench.endurance.random_model import write_random_model
from bench.endurance.run import FaultyModel, Report, config, run

BOUNDS = Bounds(resident_bytes=0.2, objects=1e-4, blocks=3e-4)
"""Of a whole run: 2 MB, a thousand objects and three thousand blocks in ten million tokens."""
TOKENS_PER_ROUND = 100_000
WARM_UP = 0.2
"""Share of the rounds that fill what is bounded: caches, pools, arenas."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)  # of faults that are made on purpose there are thousands
    rounds = max(10, asked.tokens // TOKENS_PER_ROUND)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        engine_config = config(write_random_model(Path(place) / "model", asked.seed))
        for report in run(FaultyModel.load(engine_config), engine_config, asked.tokens, rounds, asked.seed):
            _tell(report, time.monotonic() - began_s)
    growth = Growth.of(report.samples[round(rounds * WARM_UP) :])
    print(
        f"after warm-up, over {growth.tokens:,} tokens, for each million: {growth.resident_bytes * 1e6:+,.0f} resident"
        f" bytes, {growth.objects * 1e6:+,.1f} objects, {growth.blocks * 1e6:+,.1f} blocks"
    )
    print("requests by their end:", ", ".join(f"{count:,} {name}" for name, count in report.reasons.most_common()))
    found = growth.beyond(BOUNDS)
    sys.exit("\n".join(found) if found else 0)


def _tell(report: Report, seconds: float) -> None:
    last, stats = report.samples[-1], report.stats
    print(
        f"{last.tokens:>12,} tokens {seconds:8,.0f} s {last.resident_bytes / 2**20:7.1f} MiB {last.objects:>9,} objects"
        f" {last.blocks:>9,} blocks; {stats.preemptions:,} preemptions, {stats.swaps:,} swaps,"
        f" {stats.prefix_hit_rate:.0%} found, {report.listener_raised:,} callbacks raised",
        flush=True,
    )


if __name__ == "__main__":
    main()
