"""What it costs in quality to keep less of keys and values: `python -m bench.kv_quality --help`.

Every form computes in float32, so that what differs from the full KV is what the KV has lost.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from bench.context import machine
from bench.peers.place import ROOT
from bench.results import Part, Results, SideResult
from engine.compression import KVCompression
from engine.config import EngineConfig
from engine.quality import PIECE_TOKENS, Scores, sample_text, score
from engine.quality.needle import Needle, found, needles

say = Console(highlight=False).print

FORMS: dict[str, dict[str, Any]] = {
    "kv-full": {},
    "kv-int8": {"kv_cache_dtype": "int8"},
    "kv-fp8": {"kv_cache_dtype": "fp8"},
    "kv-half": {"kv_compression": KVCompression(0.5)},
    "kv-quarter": {"kv_compression": KVCompression(0.25)},
    "kv-int8-quarter": {"kv_cache_dtype": "int8", "kv_compression": KVCompression(0.25)},
}
TITLES = {
    "kv-full": "all of it, float32",
    "kv-int8": "int8",
    "kv-fp8": "fp8",
    "kv-half": "ratio 0.5",
    "kv-quarter": "ratio 0.25",
    "kv-int8-quarter": "int8, ratio 0.25",
}


def main() -> None:
    """Measure each form and record it beside the other results."""
    parser = argparse.ArgumentParser(prog="bench.kv_quality", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--needles", type=int, default=20, help="texts with a number in them")
    parser.add_argument("--tokens", type=int, default=1000, help="of each of these texts")
    parser.add_argument("--out", type=Path, default=ROOT / "bench", help="where RESULTS.md and results.json are")
    args = parser.parse_args()
    config = EngineConfig(
        args.model, device="cpu", dtype="float32", max_seq_len=max(args.tokens + 16, PIECE_TOKENS), max_num_seqs=8
    )
    asked = needles(config, args.tokens, args.needles)
    part = Part({"machine": machine(), "needles": args.needles, "needle_tokens": args.tokens})
    full: Scores | None = None
    for name, form in FORMS.items():
        scores = score(replace(config, **form), sample_text())
        full = full or scores
        part.facts["tokens"] = len(scores.logprobs)
        part.sides[name] = SideResult(
            TITLES[name],
            {
                "versions": {"headrace": version("headrace-server")},
                "settings": {"model": args.model, "dtype": "float32", "device": "cpu", **_named(form)},
            },
            [_sample(replace(config, **form), scores, full, asked)],
        )
        say(TITLES[name], part.sides[name].samples[0])
    Results(args.out).record("kv", part)


def _sample(config: EngineConfig, scores: Scores, full: Scores, asked: list[Needle]) -> dict[str, float]:
    pairs = zip(scores.logprobs, full.logprobs, strict=True)
    most = config.kv_compression.most_slots(len(asked[0].prompt))
    return {
        "perplexity": scores.perplexity,
        "agreement": scores.agreement(full),
        "logprob_error": fmean(abs(one - other) for one, other in pairs),
        "needles": fmean(found(config, asked)),
        "kept": most / len(asked[0].prompt),
    }


def _named(form: dict[str, Any]) -> dict[str, Any]:
    return {
        name: f"ratio {value.ratio:g}" if isinstance(value, KVCompression) else value for name, value in form.items()
    }


if __name__ == "__main__":
    main()
