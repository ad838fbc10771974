"""Headrace against the worker that people write today, both through a real queue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headrace import Client

from bench.context import Bench
from bench.instance import batch_size, check_jobs, instance, versions
from bench.peers.place import ROOT
from bench.results import Part, Sample, SideResult
from bench.side import SideFailed
from bench.workload import Workload, make_workload
from cli.bringup import Stack

JOBS = 64
NAIVE_JOBS = 4
"""The naive worker is slow: a round gives it this many of the jobs, evenly spaced in length."""
NEW_TOKENS = 128
JOB_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 60.0


def measure(bench: Bench) -> None:
    """Both sides take turns; a round's prompts are new to both."""
    jobs, new = (8, 16) if bench.quick else (JOBS, NEW_TOKENS)
    encode = encoder(bench.model.directory)
    part = Part()
    with (
        instance(model_path=bench.model.name, threads=bench.threads) as stack,
        naive_worker(stack, bench.model.directory) as naive,
    ):
        part.sides["naive"] = SideResult("Celery and `transformers`, one job at a time", naive_facts(naive))
        part.sides["headrace"] = SideResult("Headrace", headrace_facts(stack))
        for number in bench.turns:
            work = make_workload(encode, jobs if number >= 0 else 2, new if number >= 0 else 4, number)
            quiet = bench.quiet()
            slow = run_naive(naive, work.subset(min(NAIVE_JOBS, len(work.prompts)))) | {"busy": quiet.busy}
            quiet = bench.quiet()
            fast = run_http(stack, work) | {"busy": quiet.busy}
            if number >= 0:
                part.sides["naive"].samples.append(slow)
                part.sides["headrace"].samples.append(fast)
            bench.say(f"  naive {slow['tokens_per_s']:8.1f} tokens/s, headrace {fast['tokens_per_s']:8.1f}")
    part.facts = bench.facts(jobs=jobs, naive_jobs=min(NAIVE_JOBS, jobs), max_tokens=new)
    bench.results.record("naive", part)


def encoder(model_directory: Path) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@contextmanager
def naive_worker(stack: Stack, model_directory: Path) -> Iterator[Any]:
    """The naive Celery app with its worker running, on a database of its own of the same broker."""
    broker_url = stack.at.broker_url.removesuffix("/0") + "/1"
    os.environ |= {"NAIVE_BROKER_URL": broker_url, "NAIVE_MODEL": str(model_directory)}
    from bench.naive_worker import app

    log = stack.settings.home / "logs" / "naive.log"
    command = [sys.executable, "-m", "celery", "-A", "bench.naive_worker", "worker", "--concurrency", "1"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield app
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run_naive(naive: Any, work: Workload) -> Sample:
    """Submit all, wait for all."""
    began_s = time.perf_counter()
    sent = [
        naive.send_task("naive.generate", kwargs={"prompt": list(prompt), "max_tokens": work.max_tokens})
        for prompt in work.prompts
    ]
    tokens = [job.get(timeout=JOB_TIMEOUT_S)["tokens"] for job in sent]
    seconds = time.perf_counter() - began_s
    if tokens != [work.max_tokens] * len(sent):
        raise SideFailed(f"the naive worker gave {tokens} tokens instead of {work.max_tokens}")
    return {"tokens_per_s": sum(tokens) / seconds, "seconds": seconds}


def run_http(stack: Stack, work: Workload) -> Sample:
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
    check_jobs(jobs, work)
    tokens = len(jobs) * work.max_tokens
    return {"tokens_per_s": tokens / seconds, "seconds": seconds, "mean_batch": batch_size(jobs)}


def naive_facts(naive: Any) -> dict[str, Any]:
    facts: dict[str, Any] = naive.send_task("naive.about").get(timeout=300)
    found = {name: facts.pop(name) for name in ("transformers", "torch")}
    return {"versions": {**found, "celery": version("celery")}, "settings": {**facts, "pool": "prefork, 1 process"}}


def headrace_facts(stack: Stack) -> dict[str, Any]:
    model = stack.settings.model
    with Client(stack.at.api_url) as client:
        job = client.run([1], model=model.name, max_tokens=1, ignore_eos=True, timeout=60)
    shown = {"model": model.model_path, "max_num_seqs": model.max_num_seqs}
    if job.timings is not None:
        shown |= {"device": job.timings.device, "dtype": job.timings.dtype}
    return {"versions": versions(), "settings": shown}
