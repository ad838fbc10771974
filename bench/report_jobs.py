"""The sections of the results page that are about the job path."""

from __future__ import annotations

from bench.tables import Data, middle, spread, table


def jobs(part: Data) -> list[str]:
    """W1 as jobs, beside the engine alone."""
    rows = [
        [side["title"], f"{middle(side, 'tokens_per_s'):.0f}", spread(side, "tokens_per_s"), len(side["samples"])]
        for side in part["sides"].values()
    ]
    jobs = part["sides"]["jobs"]
    return [
        "## W1 as jobs",
        "",
        f"The prompts of W1 as {part['jobs']} Celery jobs, from their submission (`Producer.submit_many`) until the"
        " last outcome has come back through Celery, every state in the ledger (SQLite); the engine alone, in turn.",
        "",
        *table(("", "tokens/s", "lowest to highest", "rounds"), rows),
        "",
        f"Submitting took {middle(jobs, 'submitted_s') * 1e3:.0f} ms of the {middle(jobs, 'seconds'):.1f} s;"
        f" a step held {middle(jobs, 'mean_batch'):.0f} of the jobs on average.",
        *_ledger(jobs),
    ]


def _ledger(jobs: Data) -> list[str]:
    """What the ledger cost, if that was measured."""
    if "ledger_share" not in jobs["samples"][0]:
        return []
    return [
        "",
        f"The ledger's threads, in the worker and in the API, took {middle(jobs, 'ledger_cpu_s') * 1e3:.0f} ms of a"
        f" processor: {middle(jobs, 'ledger_share'):.1%} of the time, if the whole engine stood still for all of it.",
    ]


def naive(part: Data) -> list[str]:
    """Beside the worker that people write today."""
    whole = part["jobs"] * part["max_tokens"]
    rows = [
        [
            side["title"],
            f"{middle(side, 'tokens_per_s'):.1f}",
            spread(side, "tokens_per_s"),
            f"{whole / middle(side, 'tokens_per_s'):.1f}",
            len(side["samples"]),
        ]
        for side in part["sides"].values()
    ]
    return [
        "## Against the worker that people write today",
        "",
        f"{part['jobs']} jobs with prompts of 32 to 256 tokens, {part['max_tokens']} new tokens each, submitted over"
        " HTTP at once; every round has new prompts. The naive worker (Celery's own pool, `generate` for one job at a"
        f" time) is slow, so each round gives it {part['naive_jobs']} of the jobs, evenly spaced in length, and its own"
        " rate says how long all would take.",
        "",
        *table(("", "tokens/s", "lowest to highest", "s for all jobs", "rounds"), rows),
    ]


def noop(part: Data) -> list[str]:
    """Jobs that compute nothing."""
    cpu = "worker_cpu_us_per_job"
    rows = [
        [
            side["title"],
            f"{middle(side, 'jobs_per_s'):.0f}",
            spread(side, "jobs_per_s"),
            f"{middle(side, cpu):.0f}" if cpu in side["samples"][0] else "-",
            len(side["samples"]),
        ]
        for side in part["sides"].values()
    ]
    head = ("", "jobs/s", "lowest to highest", "µs of the worker's CPU a job", "rounds")
    return [
        "## Jobs that do nothing",
        "",
        f"{part['jobs']} jobs, from the first submission until each has its result in the database and its message is"
        " acknowledged; all ledgers are SQLite files.",
        "",
        *table(head, rows),
    ]


def cancel(part: Data) -> list[str]:
    """From a request to cancel to the end."""
    [side] = part["sides"].values()
    metrics = ("p50_ms", "p99_ms", "max_ms")
    return [
        "## Cancelling a running job",
        "",
        f"{side['title']}, in milliseconds: {part['cancels']} jobs one after the other while {part['running']} run. A"
        f" job's pages are free before its end is written. At most {part['allowed_ms']:g} ms are wanted at p99.",
        "",
        *table(("p50", "p99", "longest"), [[f"{middle(side, metric):.1f}" for metric in metrics]]),
    ]


def rows(part: Data) -> list[str]:
    """Ledgers with many rows."""
    sides = part["sides"]
    names = list(next(iter(sides.values()))["samples"][0])
    rows = [[name, *(f"{middle(side, name):.2f}" for side in sides.values())] for name in names]
    scanned = {what for side in sides.values() for what, tables in side["scans"].items() if tables}
    return [
        f"## A ledger of {part['rows']} jobs",
        "",
        "Milliseconds, the median of a few calls. "
        + (
            f"A table is read from end to end by: {', '.join(sorted(scanned))}."
            if scanned
            else "Nothing reads a table from end to end without an index."
        )
        + f" The machine's load was {part['load']:.0f}: on a quiet one (about 1) all of it is faster.",
        "",
        *table(("", *sides), rows),
    ]
