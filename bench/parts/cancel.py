"""From a request to cancel until the job has left the engine and the ledger says so, while others run."""

from __future__ import annotations

import time

from headrace import Client, JobRequest, JobStatus, Producer

from bench.context import machine
from bench.instance import instance, versions
from bench.percentiles import percentile
from bench.quiet import wait_quiet
from bench.results import Part, SideResult
from bench.side import SideFailed
from ledger import Ledger
from ledger.contract import JobFilter

RUNNING = 64
"""Jobs in the engine all the while: another takes the place of each that is cancelled."""
STEP_S = 0.02
MODEL = f"fake:step_s={STEP_S},context_len=8192"
MAX_TOKENS = 8000
START_S = 60.0
ALLOWED_MS = 1e3 * STEP_S + 50.0
"""One step of the engine, and 50 ms."""


def measure_cancel(cancels: int, patience_s: float) -> Part:
    """Cancel jobs one after the other over HTTP. A job's pages are free before its end is written."""
    settings = {"max_num_seqs": RUNNING, "kv_cache_bytes": 2**30}
    with instance(alias="fake", model_path=MODEL, **settings) as stack, Client(stack.at.api_url) as client:
        ledger = Ledger(stack.at.database_url)
        with Producer(stack.at.broker_url) as producer:
            asked = JobRequest(
                model=stack.settings.model.name, prompt="x", max_tokens=MAX_TOKENS, ignore_eos=True, metadata={}
            )
            producer.submit_many([asked] * (RUNNING + cancels))
        _await_running(ledger)
        quiet = wait_quiet(patience_s)
        took_ms = [_cancel(client, ledger) for _ in range(cancels)]
        sample = {f"p{share}_ms": percentile(took_ms, share / 100) for share in (50, 99)}
        sample |= {"max_ms": max(took_ms), "busy": quiet.busy}
        facts = {"settings": settings | {"model": MODEL, "ledger": "SQLite"}, "versions": versions()}
        ledger.request_cancel(_running(ledger))
        ledger.close()
    side = SideResult("From POST /v1/jobs/ID/cancel to the job's end in the ledger", facts, [sample])
    part_facts = {"machine": machine(), "cancels": cancels, "running": RUNNING, "allowed_ms": ALLOWED_MS}
    return Part(sides={"headrace-cancel": side}, facts=part_facts)


def _await_running(ledger: Ledger) -> None:
    until_s = time.monotonic() + START_S
    while len(_running(ledger)) < RUNNING:
        if time.monotonic() > until_s:
            raise SideFailed(f"{RUNNING} jobs were not running after {START_S:g} s: {ledger.counts()}")
        time.sleep(STEP_S)


def _running(ledger: Ledger) -> list[str]:
    return [job.id for job in ledger.page(JobFilter(status=JobStatus.RUNNING, limit=100)).data]


def _cancel(client: Client, ledger: Ledger) -> float:
    """Milliseconds until the end of the job that has run for the longest, by the clock that both share."""
    job_id = _running(ledger)[-1]
    began_s = time.time()
    client.cancel(job_id)
    job = client.wait(job_id, timeout=START_S)
    if job.status is not JobStatus.CANCELLED or job.finished_at is None:
        raise SideFailed(f"job {job_id} was cancelled and is {job.status}")
    time.sleep(2 * STEP_S)
    return 1e3 * (job.finished_at.timestamp() - began_s)
