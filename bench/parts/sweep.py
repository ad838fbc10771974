"""How a decode step's time grows with the batch, the context and the size of pages."""

from __future__ import annotations

from statistics import median

from bench.context import Bench, add_sample
from bench.floors import batch_step_floor_s
from bench.limits import Limits
from bench.percentiles import gaps_ms
from bench.results import Part
from bench.side import Side, SideFailed, Sides
from bench.sides.protocol import Arrival, Played

BATCHES = (1, 4, 16, 64)
CONTEXTS = (128, 512, 2048)
PAGES = (8, 16, 32, 64)
MOST_TOKENS = 32768
"""Of all contexts of a batch together: larger ones say no more and take long to fill."""
NEW_TOKENS = 32
"""Of each request while all of them decode; the first ones get more, since the last ones' prompts take their time."""
STEP_TOKENS = 1024
POOL_BYTES = 5 * 2**28
"""Room for all contexts of the largest batch and their new tokens."""
SETTINGS = {
    "max_seq_len": 2560,
    "max_num_batched_tokens": STEP_TOKENS,
    "prefill_share": 1.0,
    "kv_cache_bytes": POOL_BYTES,
}


def measure(bench: Bench) -> None:
    """Every batch and context with pages of 16 tokens, then every page size with one of them."""
    points = [(batch, context) for context in CONTEXTS for batch in BATCHES if batch * context <= MOST_TOKENS]
    part = Part()
    limits = bench.limits()
    specs = [
        bench.roster.headrace("bf16", f"-pages-{page}", page_size=page, **SETTINGS)
        for page in ((16,) if bench.quick else (16, *(page for page in PAGES if page != 16)))
    ]
    with Sides(bench.chosen(specs)) as sides:
        for name in sides.names:
            wanted = points[:2] if bench.quick else points
            page = int(name.rpartition("-")[2])
            for batch, context in wanted if page == 16 else [(16, 512), (64, 512)]:
                quiet = bench.quiet()
                try:
                    with sides.turn(name) as side:
                        sample = _point(bench, side, batch, context, limits)
                        add_sample(part, side, sample | {"page": page, "busy": quiet.busy})
                except SideFailed as failure:
                    bench.say(f"  left out: {failure}")
                    break
                bench.say(
                    f"  sweep: {batch:3d} requests, {context:4d} tokens of context, pages of {page:2d}:"
                    f" {sample['ms_per_step']:7.2f} ms a step"
                )
    part.facts = bench.facts([limits], failed=sides.failed)
    bench.results.record("sweep", part)


def _point(bench: Bench, side: Side, batch: int, context: int, limits: Limits) -> dict[str, float]:
    """The median time between two tokens once every request has its first."""
    text = [token for prompt in bench.work.w1.prompts for token in prompt] * 8
    new = NEW_TOKENS + batch + batch * context // STEP_TOKENS
    arrivals: list[Arrival] = [
        {"at_s": 0.0, "prompt": text[at * 17 : at * 17 + context], "max_tokens": new, "awaited": True}
        for at in range(batch)
    ]
    played: list[Played] = side.ask("play", arrivals=arrivals)
    decoding_s = max(one["token_s"][0] for one in played)
    ended_s = min(one["token_s"][-1] for one in played)
    gaps = gaps_ms(played, from_s=decoding_s + 1e-9, until_s=ended_s)
    if not gaps:
        raise SideFailed(f"{side.spec.name} never had {batch} requests at once")
    ms = median(gaps)
    floor_s = batch_step_floor_s(bench.shape, limits, side.spec.weights_bytes, batch, context)
    return {
        "batch": batch,
        "context": context,
        "ms_per_step": ms,
        "tokens_per_s": batch / ms * 1e3,
        "share_of_limit": floor_s * 1e3 / ms,
    }
