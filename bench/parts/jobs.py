"""W1 as Celery jobs through a whole Headrace (broker, durable ledger, worker), against the engine alone."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from headrace import JobRequest, Producer
from prometheus_client.parser import text_string_to_metric_families

from bench.context import Bench, add_sample, run
from bench.instance import batch_size, check_jobs, instance, versions
from bench.results import Part, Sample, SideResult
from bench.roster import KV_POOL_BYTES, MAX_SEQ_TOKENS, MAX_SEQS
from bench.side import SideFailed, Sides
from bench.workload import Workload
from cli.bringup import Stack
from ledger.cost import NAME as LEDGER_CPU

JOB_TIMEOUT_S = 1800.0
SETTINGS = {
    "dtype": "bfloat16",
    "max_num_seqs": MAX_SEQS,
    "max_seq_len": MAX_SEQ_TOKENS,
    "kv_cache_bytes": KV_POOL_BYTES,
    "enable_prefix_caching": False,
}
"""The same for both. Every round has the same prompts, so no prefix may be kept."""


def measure(bench: Bench) -> None:
    """The engine alone and the whole system take turns; the engine is frozen while the jobs run.

    The jobs run once before, uncounted, as a side does at its start: the first touch of memory is nobody's speed.
    """
    spec = bench.roster.headrace("bf16", "-alone", **SETTINGS)
    part = Part()
    settings = {"model_path": bench.model.name, "threads": bench.threads, **SETTINGS}
    with Sides([spec]) as sides, instance(**settings) as stack:
        part.sides["jobs"] = SideResult(
            "Celery jobs through the whole of Headrace", {"versions": versions(), "settings": settings}
        )
        run_jobs(stack, bench.work.w1)
        for number in bench.turns:
            quiet = bench.quiet()
            with sides.turn(spec.name) as side:
                alone = bench.work.w1.max_tokens * len(bench.work.w1.prompts) / run(side, bench.work.w1)["seconds"]
                if number >= 0:
                    add_sample(part, side, {"tokens_per_s": alone, "busy": quiet.busy})
            quiet = bench.quiet()
            sample = run_jobs(stack, bench.work.w1)
            if number >= 0:
                part.sides["jobs"].samples.append(sample | {"busy": quiet.busy})
            bench.say(
                f"  jobs: engine alone {alone:8.1f} tokens/s, as jobs {sample['tokens_per_s']:8.1f}"
                f"{'' if number >= 0 else ' (warm-up)'}"
            )
    part.sides["engine"] = part.sides.pop(spec.name)
    part.facts = bench.facts(jobs=len(bench.work.w1.prompts), max_tokens=bench.work.w1.max_tokens)
    bench.results.record("jobs", part)


def run_jobs(stack: Stack, work: Workload) -> Sample:
    """From the submission to Celery, of all at once as the engine alone gets them, until the last outcome has come back
    through it."""
    model = stack.settings.model.name
    spent_s = ledger_cpu_s(stack)
    with Producer(stack.at.broker_url) as producer, ThreadPoolExecutor(1) as waiter:
        began_s = time.perf_counter()
        asked: dict[str, Any] = {"max_tokens": work.max_tokens, "temperature": 0, "ignore_eos": True, "stream": False}
        sent = producer.submit_many(JobRequest(model=model, prompt=list(prompt), **asked) for prompt in work.prompts)
        submitted_s = time.perf_counter() - began_s
        jobs = list(waiter.map(lambda job: producer.wait(job, timeout=JOB_TIMEOUT_S), sent))
        seconds = time.perf_counter() - began_s
    check_jobs(jobs, work)
    spent_s = ledger_cpu_s(stack) - spent_s
    return {
        "tokens_per_s": len(jobs) * work.max_tokens / seconds,
        "seconds": seconds,
        "submitted_s": submitted_s,
        "mean_batch": batch_size(jobs),
        "ledger_cpu_s": spent_s,
        "ledger_share": spent_s / seconds,
    }


def ledger_cpu_s(stack: Stack) -> float:
    """What the ledger's threads in the API and in the worker have taken of a processor since their start."""
    pages = [httpx.get(url, timeout=10).text for url in (f"{stack.at.api_url}/metrics", stack.at.metrics_url)]
    found = [family for page in pages for family in text_string_to_metric_families(page)]
    costs = [sample.value for family in found if family.name == LEDGER_CPU for sample in family.samples]
    if len(costs) != len(pages):
        raise SideFailed(f"the API and the worker don't tell {LEDGER_CPU}")
    return sum(costs)
