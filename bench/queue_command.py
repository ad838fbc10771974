"""The command line of the queue's benchmark."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console

from bench.context import machine
from bench.parts.cancel import measure_cancel
from bench.parts.noop import CeleryJobs, HeadraceJobs
from bench.parts.rows import measure_rows
from bench.peers.place import HOME, ROOT
from bench.quiet import PATIENCE_S, wait_quiet
from bench.results import Part, Results

say = Console(highlight=False).print
QUICK_JOBS = 200
QUICK_ROWS = 20_000
QUICK_CANCELS = 10


def main() -> None:
    """Run what was asked for, and record it beside the engine's results."""
    parser = argparse.ArgumentParser(prog="bench/queue.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side; 0 leaves them out")
    parser.add_argument("--jobs", type=int, default=3000, help="of each turn")
    parser.add_argument("--cancels", type=int, default=200, help="jobs that are cancelled while 64 run; 0: none")
    parser.add_argument("--rows", type=int, default=1_000_000, help="jobs in the filled ledgers; 0 leaves them out")
    parser.add_argument("--database", help="URL of an empty PostgreSQL database to be filled beside SQLite")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds to wait for a quiet machine")
    parser.add_argument("--quick", action="store_true", help="little work, to try the benchmark itself")
    parser.add_argument("--out", type=Path, help="where RESULTS.md and results.json are; with --quick not in bench/")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.jobs, args.rows, args.patience = 1, QUICK_JOBS, min(args.rows, QUICK_ROWS), 0.0
        args.cancels = min(args.cancels, QUICK_CANCELS)
    results = Results(args.out or (HOME / "quick" if args.quick else ROOT / "bench"))
    if args.rounds:
        results.record("noop", measure_noop(args.rounds, args.jobs, args.patience))
    if args.cancels:
        results.record("cancel", measure_cancel(args.cancels, args.patience))
    if args.rows:
        results.record("rows", measure_rows(args.rows, args.database, say))
    say(f"\n{results.directory / 'RESULTS.md'}")


def measure_noop(rounds: int, jobs: int, patience_s: float) -> Part:
    """Headrace with one worker and with two and Celery take turns; the others' workers are idle meanwhile."""
    part = Part()
    with (
        tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory,
        HeadraceJobs.running() as ours,
        HeadraceJobs.running(workers=2) as two,
        CeleryJobs.running(ours.broker_url.removesuffix("/0") + "/1", Path(directory)) as theirs,
    ):
        sides: dict[str, HeadraceJobs | CeleryJobs] = {
            "headrace-noop": ours,
            "headrace-noop-two": two,
            "celery-noop": theirs,
        }
        part.sides = {name: side.facts() for name, side in sides.items()}
        for number in range(-1, rounds):
            for name, side in sides.items():
                quiet = wait_quiet(patience_s)
                sample = side.round(jobs).sample(jobs) | {"busy": quiet.busy}
                if number >= 0:
                    part.sides[name].samples.append(sample)
                rate, cpu_us = sample["jobs_per_s"], sample["worker_cpu_us_per_job"]
                say(f"  {name}: {rate:.0f} jobs/s, {cpu_us:.0f} µs of the worker's CPU each")
    part.facts = {"machine": machine(), "jobs": jobs}
    return part
