"""Headrace against the worker that people write today, through the real queue: `make bench`."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headrace import Client, JobStatus
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.export import export_model
from bench.report import SIDES, Report, Round
from bench.workload import Workload, make_workload
from cli.bringup import Plan, Screen, Stack
from cli.instance import sole
from cli.signals import Interrupt, interrupts
from settings import Settings, get_settings, settings_with

HERE = Path(__file__).parent
JOB_TIMEOUT_S = 1800.0


def main() -> None:
    args = arguments()
    settings = get_settings()
    model_directory = export_model(settings.model.model_path, settings.cache)
    encode = encoder(model_directory)
    with (
        tempfile.TemporaryDirectory(prefix="headrace-bench-") as home,
        interrupts() as interrupt,
        instance(Path(home), interrupt) as stack,
        naive_worker(stack, model_directory) as naive,
    ):
        report = Report([], args.jobs, args.max_tokens, machine())
        report.sides["naive"] = naive_facts(naive)
        warm_up(stack, naive, encode)
        run_rounds(args, report, stack, naive, encode)
        report.sides["headrace"] = headrace_facts(stack)
    report.write(args.out)
    print((args.out / "RESULTS.md").read_text())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=64, help="jobs of a round")
    parser.add_argument("--naive-jobs", type=int, default=4, help="how many of them the naive worker gets")
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens for each job")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE, help="where RESULTS.md and results.json go")
    return parser.parse_args()


def encoder(model_directory: Path) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@contextmanager
def instance(home: Path, interrupt: Interrupt) -> Iterator[Stack]:
    """A whole Headrace on free ports."""
    settings = settings_with(home=home, api={"port": 0}, worker={"metrics_port": 0})
    stack = Stack.plan(Plan(settings, broker_port=0, flower=False), Screen(quiet=True), interrupt)
    with sole(home):
        try:
            stack.start()
            yield stack
        finally:
            stack.stop()


@contextmanager
def naive_worker(stack: Stack, model_directory: Path) -> Iterator[Any]:
    """The naive Celery app with its worker running, on a database of its own of the same broker."""
    broker_url = stack.at.broker_url.removesuffix("/0") + "/1"
    os.environ |= {"NAIVE_BROKER_URL": broker_url, "NAIVE_MODEL": str(model_directory)}
    from bench.naive_worker import app

    log = stack.settings.home / "logs" / "naive.log"
    command = [sys.executable, "-m", "celery", "-A", "bench.naive_worker", "worker", "--concurrency", "1"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=HERE.parent, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield app
    finally:
        process.terminate()
        process.wait(60)


def warm_up(stack: Stack, naive: Any, encode: Callable[[str], list[int]]) -> None:
    """Let both sides do a little before anything is timed."""
    work = make_workload(encode, jobs=2, max_tokens=4, round_number=-1)
    run_naive(naive, work)
    run_headrace(stack, work)


def run_rounds(
    args: argparse.Namespace, report: Report, stack: Stack, naive: Any, encode: Callable[[str], list[int]]
) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=2 * args.rounds)
        for number in range(args.rounds):
            work = make_workload(encode, args.jobs, args.max_tokens, number)
            for side in SIDES:
                progress.update(bar, description=f"round {number + 1} of {args.rounds}: {side}")
                if side == "naive":
                    done = run_naive(naive, work.subset(min(args.naive_jobs, args.jobs)))
                else:
                    done = run_headrace(stack, work)
                report.rounds.append(done)
                progress.print(f"round {number + 1} {side:>8}: {done.tokens_per_second:8.1f} tokens/s")
                progress.advance(bar)


def run_naive(naive: Any, work: Workload) -> Round:
    """Submit all, wait for all."""
    began_s = time.perf_counter()
    sent = [
        naive.send_task("naive.generate", kwargs={"prompt": list(prompt), "max_tokens": work.max_tokens})
        for prompt in work.prompts
    ]
    results = [job.get(timeout=JOB_TIMEOUT_S) for job in sent]
    seconds = time.perf_counter() - began_s
    tokens = sum(result["tokens"] for result in results)
    return finished(Round("naive", len(sent), work.prompt_tokens, tokens, seconds), work)


def run_headrace(stack: Stack, work: Workload) -> Round:
    """Submit all over HTTP, wait for all."""
    began_s = time.perf_counter()
    with Client(stack.at.api_url) as client:
        sent = [
            client.submit(
                prompt,
                model=stack.settings.model.name,
                max_tokens=work.max_tokens,
                temperature=0,
                ignore_eos=True,
                stream=False,
            )
            for prompt in work.prompts
        ]
        jobs = [client.wait(job, timeout=JOB_TIMEOUT_S) for job in sent]
    seconds = time.perf_counter() - began_s
    for job in jobs:
        if job.status is not JobStatus.SUCCEEDED:
            sys.exit(f"job {job.id} {job.status}: {job.error.message if job.error else ''}")
    tokens = sum(job.result.usage.completion_tokens for job in jobs if job.result)
    sizes = [job.timings.mean_batch_size for job in jobs if job.timings and job.timings.mean_batch_size]
    return finished(Round("headrace", len(jobs), work.prompt_tokens, tokens, seconds, tuple(sizes)), work)


def finished(done: Round, work: Workload) -> Round:
    """The round, if both sides did the work that was asked."""
    asked = len(work.prompts) * work.max_tokens
    if done.output_tokens != asked:
        sys.exit(f"{done.side} gave {done.output_tokens} tokens instead of {asked}")
    return done


def naive_facts(naive: Any) -> dict[str, Any]:
    facts: dict[str, Any] = naive.send_task("naive.about").get(timeout=300)
    return facts | {"celery": version("celery"), "pool": "prefork, 1 process"}


def headrace_facts(stack: Stack) -> dict[str, Any]:
    settings: Settings = stack.settings
    with Client(stack.at.api_url) as client:
        job = client.run([1], model=settings.model.name, max_tokens=1, ignore_eos=True, timeout=60)
    return {
        "version": installed("headrace-server"),
        "model": settings.model.model_path,
        "device": job.timings.device if job.timings else "",
        "dtype": job.timings.dtype if job.timings else "",
        "most in a batch": settings.model.max_num_seqs,
    }


def installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "from a working tree"


def machine() -> dict[str, str]:
    """What a reader has to know of the machine."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "machine": f"{cpu}, {os.cpu_count()} logical processors",
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


if __name__ == "__main__":
    main()
