"""`RESULTS.md`: the numbers of `results.json` for people."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench import report_jobs
from bench.floors import Shape, batch_floor_s, token_floor_s
from bench.limits import Limits
from bench.ratios import BOUNDS, RATIOS
from bench.tables import Data, limits_line, middle, spread, table


def page(data: Data) -> str:
    """The whole page, from whatever parts there are."""
    parts: Data = data["parts"]
    sections: list[tuple[str, Callable[[Data], list[str]]]] = [
        ("w1", lambda part: _together("W1: 64 prompts at once", part)),
        ("w2", lambda part: _together("W2: the same behind one shared prefix", part)),
        ("w3", _one),
        ("start", _start),
        ("jobs", report_jobs.jobs),
        ("stall", _stall),
        ("online", _online),
        ("sweep", _sweep),
        ("kv", _kv),
        ("naive", report_jobs.naive),
        ("noop", report_jobs.noop),
        ("cancel", report_jobs.cancel),
        ("rows", report_jobs.rows),
    ]
    lines = ["# Headrace's speed", "", *_ratios(data), *_bounds(data)]
    for name, section in sections:
        if name in parts and parts[name]["sides"]:
            lines += [*section(parts[name]), ""]
    lines += [*_settings(parts), "", *_method(parts)]
    return "\n".join(lines).rstrip() + "\n"


def _ratios(data: Data) -> list[str]:
    rows = []
    for ratio in RATIOS:
        if (entry := data.get(ratio.key)) is None:
            continue
        ours, theirs = entry["headrace"], entry["peer"]
        scale, unit = _unit(ratio.metric)
        rows.append(
            [
                ratio.what,
                f"{ours['median'] * scale:.4g} {unit}",
                f"{theirs['median'] * scale:.4g} {unit}",
                f"**{entry['ratio']:.2f}**",
                f"{min(entry['round_ratios']):.2f} to {max(entry['round_ratios']):.2f}",
                f"{ratio.at_least:g}{'' if entry['ratio'] >= ratio.at_least else ' (missed)'}",
            ]
        )
    if not rows:
        return []
    head = ("", "Headrace", "the other", "times better", "in single rounds", "wanted")
    return [
        *table(head, rows),
        "",
        "Medians of rounds in which the sides took turns. Over 1, Headrace is better, whatever is measured.",
        "",
    ]


def _bounds(data: Data) -> list[str]:
    rows = []
    for bound in BOUNDS:
        if (entry := data.get(bound.key)) is None:
            continue
        scale, unit = _unit(bound.metric)
        wanted = f"{'at least' if bound.higher_is_better else 'at most'} {bound.limit * scale:g} {unit}"
        rows.append(
            [
                bound.what,
                f"**{entry['value'] * scale:.4g}** {unit}",
                f"{entry['lowest'] * scale:.4g} to {entry['highest'] * scale:.4g}",
                wanted + ("" if bound.holds(entry["value"]) else " (missed)"),
            ]
        )
    return [*table(("", "Headrace", "in single rounds", "wanted"), rows), ""] if rows else []


def _unit(metric: str) -> tuple[float, str]:
    """What to multiply a metric with, and what it is then called."""
    units = {
        "tokens_per_s": (1, "tokens/s"), "ms_per_token": (1, "ms"), "first_token_s": (1, "s"),
        "peak_bytes": (1e-6, "MB"), "itl_p99_ms": (1, "ms"), "jobs_per_s": (1, "jobs/s"),
        "p99_ms": (1, "ms"), "ledger_share": (100, "%"),
    }  # fmt: skip
    return units[metric]


def _limits(part: Data) -> tuple[Limits, Shape] | None:
    return (Limits(**part["limits"]), Shape(**part["shape"])) if "limits" in part and "shape" in part else None


def _together(title: str, part: Data) -> list[str]:
    work, known, rows = part["work"], _limits(part), []
    for side in part["sides"].values():
        seconds = middle(side, "seconds")
        share = "-"
        if known is not None:
            limits, shape = known
            lengths = work["prompt_tokens"]
            floor_s = batch_floor_s(
                shape, limits, side["precision"], lengths, work["shared_tokens"], work["max_tokens"]
            )
            share = f"{floor_s / seconds:.0%}"
        agreed = side.get("agreement")
        pool = side.get("kv_pool_bytes")
        rows.append(
            [
                side["title"] + (" *" if side["prompts"] < len(work["prompt_tokens"]) else ""),
                f"{middle(side, 'tokens_per_s'):.0f}",
                spread(side, "tokens_per_s"),
                f"{seconds:.1f}",
                share,
                f"{middle(side, 'peak_bytes') / 1e6:.0f}" + (f" ({pool / 1e6:.0f})" if pool else ""),
                f"{agreed['first_token']:.0%}, {agreed['equal_tokens']:.0f}" if agreed else "-",
                len(side["samples"]),
            ]
        )
    head = (
        "", "tokens/s", "lowest to highest", "seconds", "of the limit", "peak MB (KV pool allowed)",
        "first tokens as Headrace bf16, equal tokens", "rounds",
    )  # fmt: skip
    lengths = work["prompt_tokens"]
    shared = f", the first {work['shared_tokens']} the same for all" if work["shared_tokens"] else ""
    return [
        f"## {title}",
        "",
        f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens ({sum(lengths)} in all{shared}),"
        f" {work['max_tokens']} new tokens each.",
        "",
        *table(head, rows),
        "",
        limits_line(part),
        "A side marked * got a few of the prompts, evenly spaced in length; its seconds are extrapolated to all.",
    ]


def _one(part: Data) -> list[str]:
    work, known, rows = part["work"], _limits(part), []
    context = work["prompt_tokens"][0] + work["max_tokens"] // 2
    for side in part["sides"].values():
        ms, share = middle(side, "ms_per_token"), "-"
        if known is not None:
            limits, shape = known
            share = f"{token_floor_s(shape, limits, side['weights_bytes'], context) * 1e3 / ms:.0%}"
        rows.append(
            [
                side["title"],
                f"{ms:.2f}",
                spread(side, "ms_per_token"),
                share,
                f"{middle(side, 'first_token_ms'):.1f}",
                len(side["samples"]),
            ]
        )
    head = ("", "ms a token", "lowest to highest", "of the limit", "ms to the first token", "rounds")
    return [
        "## W3: one request at a time",
        "",
        f"{len(work['prompt_tokens'])} prompts of {work['prompt_tokens'][0]} tokens, {work['max_tokens']} new tokens"
        " each: the time for all tokens less the time for one.",
        "",
        *table(head, rows),
        "",
        limits_line(part),
    ]


def _start(part: Data) -> list[str]:
    rows = [
        [
            side["title"],
            f"{middle(side, 'first_token_s'):.2f}",
            spread(side, "first_token_s"),
            f"{middle(side, 'loaded_s'):.2f}",
            len(side["samples"]),
        ]
        for side in part["sides"].values()
    ]
    return [
        "## Start",
        "",
        f"From the start of the process until the first token of a prompt of {part['prompt_tokens']} tokens is out;"
        " files and compiled code are cached from a start before.",
        "",
        *table(("", "s to the first token", "lowest to highest", "s to be ready", "rounds"), rows),
    ]


def _stall(part: Data) -> list[str]:
    metrics = ("itl_p50_ms", "itl_p99_ms", "itl_max_ms", "long_first_token_ms")
    rows = [
        [
            "capped" if name.endswith("-capped") else "uncapped",
            f"{side['settings'].get('prefill_share', 1.0):g}",
            *(f"{middle(side, metric):.1f}" for metric in metrics),
            len(side["samples"]),
        ]
        for name, side in part["sides"].items()
    ]
    head = ("", "`prefill_share`", "p50 ms", "p99 ms", "longest ms", "long prompt's first token ms", "rounds")
    return [
        "## While long prompts arrive",
        "",
        f"{part['steady']} requests decode while {part['long_prompts']} prompts of {part['long_prompt_tokens']} tokens"
        " arrive: the time between two tokens of those that decode.",
        "",
        *table(head, rows),
    ]


def _online(part: Data) -> list[str]:
    rows = []
    rates = sorted({sample["rate"] for side in part["sides"].values() for sample in side["samples"]})
    metrics = ("first_token_p50_ms", "first_token_p99_ms", "itl_p50_ms", "itl_p99_ms", "tokens_per_s")
    for rate in rates:
        for side in part["sides"].values():
            for sample in side["samples"]:
                if sample["rate"] == rate:
                    rows.append([f"{rate:g}", side["title"], *(f"{sample[metric]:.1f}" for metric in metrics)])
    head = ("requests/s", "", "first token p50 ms", "p99", "between tokens p50 ms", "p99", "tokens/s")
    return [
        "## Online",
        "",
        f"{part['requests']} requests of W1 that arrive at random (Poisson, the same moments for all sides),"
        f" {part['max_tokens']} new tokens each.",
        "",
        *table(head, rows),
    ]


def _sweep(part: Data) -> list[str]:
    samples = [sample for side in part["sides"].values() for sample in side["samples"]]
    rows = [
        [
            f"{sample['batch']:.0f}",
            f"{sample['context']:.0f}",
            f"{sample['page']:.0f}",
            f"{sample['ms_per_step']:.2f}",
            f"{sample['tokens_per_s']:.0f}",
            f"{sample['share_of_limit']:.0%}",
        ]
        for sample in samples
    ]
    head = ("requests", "tokens of context", "tokens a page", "ms a step", "tokens/s", "of the limit")
    return ["## A decode step of Headrace, bf16", "", *table(head, rows), "", limits_line(part)]


def _kv(part: Data) -> list[str]:
    rows = [
        [
            side["title"],
            f"{middle(side, 'kept'):.0%}",
            f"{middle(side, 'perplexity'):.2f}",
            f"{middle(side, 'agreement'):.1%}",
            f"{middle(side, 'logprob_error'):.3f}",
            f"{middle(side, 'needles'):.0%}",
        ]
        for side in part["sides"].values()
    ]
    head = (
        "keys and values",
        "tokens held at most",
        "perplexity",
        "greedy agreement",
        "logprob error",
        "needles found",
    )
    return [
        "## Keys and values at half size and below",
        "",
        f"{part['tokens']} tokens of a fixed text, and {part['needles']} texts of {part['needle_tokens']} tokens with a"
        " number in them, at evenly spaced depths, that has to be said again at their end. Everything is computed in"
        " float32: what differs from the full KV is what the KV has lost. An error is the mean of the absolute"
        " difference. What is held at most is a share of these texts' tokens.",
        "",
        *table(head, rows),
    ]


def _settings(parts: Data) -> list[str]:
    seen: dict[str, Data] = {}
    machines: dict[str, str] = {}
    for part in parts.values():
        machines |= part.get("machine", {})
        for name, side in part["sides"].items():
            seen.setdefault(name, side)
    rows = [
        [
            f"`{name}`",
            side["measured"][:10],
            _pairs(side.get("versions", {})),
            _pairs(side.get("settings", {})),
        ]
        for name, side in seen.items()
    ]
    return [
        "## Machine, versions, settings",
        "",
        "; ".join(f"{name}: {value}" for name, value in machines.items()) + ".",
        "",
        *table(("side", "measured", "versions", "settings"), rows),
    ]


def _pairs(values: Data) -> str:
    return ", ".join(f"{name} {Path(value).name if _is_path(value) else value}" for name, value in values.items())


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.startswith("/")


def _method(parts: Data) -> list[str]:
    threads = sorted({part["threads"] for part in parts.values() if "threads" in part})
    return [
        "## How",
        "",
        "Greedy, the end of text ignored, the same token ids for every side,"
        f" {' or '.join(map(str, threads))} threads each. Every side is a process"
        " of its own that stays loaded and is frozen (SIGSTOP) while another has its turn; in each round every side has"
        " one turn; before each turn the machine has to be quiet; prefix caches are emptied before each run. Every"
        " output is checked to have all its tokens. Headrace guesses tokens ahead by prompt lookup, its default, which"
        " changes no token; the others do nothing of the kind, as is their default, and one side of Headrace shows"
        " what it does without. A share of the limit is the time that the products and the reading"
        " of memory would take at the measured rates, one after the other, over the time taken.",
        "",
        "Made by `make bench-peers` and `python bench/engine.py`; every round is in `results.json`.",
    ]
