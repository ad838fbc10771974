"""A ledger of a million jobs: how long each of its methods takes, and by which plan."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

from headrace.contract import JobRequest, JobResult, JobStatus, Priority, new_job_id
from sqlalchemy import insert

from bench.context import machine
from bench.plans import Plans, analyze, scans
from bench.results import Part, SideResult
from ledger import Ledger
from ledger.contract import Claim, JobFilter, Outcome, Retention, Windows
from ledger.lines import Line
from ledger.migrate import upgrade
from ledger.models import JobRow, OutboxRow, ResultRow

CHUNK = 5000
QUEUED_SHARE = 0.01
"""Of the jobs; all others have ended."""
MODELS = ("a", "b")
TENANTS = 50
TIMES = 9
Method = Callable[[], object]


def measure_rows(rows: int, postgres_url: str | None, say: Callable[[str], None]) -> Part:
    part = Part(facts={"machine": machine(), "rows": rows})
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        urls = {"sqlite": f"sqlite:///{Path(directory) / 'ledger.sqlite3'}"}
        if postgres_url is not None:
            urls["postgresql"] = postgres_url
        for name, url in urls.items():
            upgrade(url)
            ledger = Ledger(url)
            began_s = time.perf_counter()
            fill(ledger, rows)
            say(f"  {name}: {rows} jobs in {time.perf_counter() - began_s:.0f} s")
            part.sides[name] = timed(ledger, name, say)
            ledger.close()
    part.facts["load"] = os.getloadavg()[1]
    return part


def fill(ledger: Ledger, rows: int) -> None:
    """Ended jobs over the last 100 days, and at their end some that wait."""
    engine = ledger._database.engine
    now = datetime.now(UTC)
    queued_from = rows - int(rows * QUEUED_SHARE)
    for first in range(0, rows, CHUNK):
        jobs = [_job(n, rows, n >= queued_from, now) for n in range(first, min(first + CHUNK, rows))]
        ended = [{"job_id": job["id"], "text": "x" * 200} for job in jobs if job["finished_at"]]
        places = [_place(job) for job in jobs if not job["finished_at"]]
        with engine.begin() as connection:
            connection.execute(insert(JobRow), jobs)
            if ended:
                connection.execute(insert(ResultRow), ended)
            if places:
                connection.execute(insert(OutboxRow), places)
    analyze(engine)


def _job(number: int, rows: int, queued: bool, now: datetime) -> dict[str, Any]:
    moment = now - timedelta(days=100 * (1 - number / rows))
    return {
        "id": new_job_id(moment.timestamp()),
        "tenant": f"t{number % TENANTS}",
        "model": MODELS[number % len(MODELS)],
        "status": JobStatus.QUEUED if queued else JobStatus.SUCCEEDED,
        "priority": Priority.NORMAL,
        "max_attempts": 3,
        "created_at": moment,
        "accepted_at": moment,
        "queued_at": moment,
        "finished_at": None if queued else moment,
        "deadline": None,
        "tokens": 300,
        "metadata": {},
        "request": {"model": MODELS[number % len(MODELS)], "prompt": "x", "seed": 1},
    }


def _place(job: dict[str, Any]) -> dict[str, Any]:
    line = str(Line(job["model"], job["priority"], job["tenant"]))
    return {"job_id": job["id"], "topic": "publish", "line": line, "due_at": job["queued_at"]}


def timed(ledger: Ledger, name: str, say: Callable[[str], None]) -> SideResult:
    """The median of a few calls of each method, in milliseconds, and what it reads from end to end."""
    plans = Plans(ledger._database.engine)
    sample: dict[str, float] = {}
    scanned: dict[str, list[str]] = {}
    for what, method in methods(ledger):
        found = plans.watch(method)
        took_s = []
        for _ in range(TIMES):
            began_s = time.perf_counter()
            method()
            took_s.append(time.perf_counter() - began_s)
        sample[what] = 1e3 * median(took_s)
        scanned[what] = sorted(set().union(*(scans(plan) for plan in found.values()), set()))
        say(f"  {name}: {what}: {sample[what]:.2f} ms" + (f", scans {scanned[what]}" if scanned[what] else ""))
    return SideResult(name, {"versions": {}, "settings": {}, "scans": scanned}, [sample])


def methods(ledger: Ledger) -> Iterator[tuple[str, Method]]:
    """Each of the ledger's methods that runs often, as it is called."""
    newest = ledger.page(JobFilter(limit=100)).data
    middle = ledger.page(JobFilter(status=JobStatus.SUCCEEDED, limit=1)).data[0].id
    request = JobRequest(model="a", prompt="x", max_tokens=100, metadata={})

    def claim_and_commit() -> None:
        results = ledger.claim([Claim(new_job_id(), request) for _ in range(64)], "bench", 60)
        leases = [result.lease for result in results if result.lease is not None]
        ledger.commit([Outcome(lease, JobStatus.SUCCEEDED, JobResult(text="x")) for lease in leases])

    ended = [job.id for job in ledger.page(JobFilter(status=JobStatus.SUCCEEDED, limit=100)).data]

    def renew_and_hand_back() -> None:
        results = ledger.claim([Claim(new_job_id(), request) for _ in range(64)], "bench", 60)
        leases = [result.lease for result in results if result.lease is not None]
        ledger.renew(leases, 60)
        ledger.release(leases)
        ledger.republish([lease.job_id for lease in leases])

    def relay() -> None:
        rows = ledger.outbox(500, Windows(128))
        ledger.sent([row.id for row in rows])
        ledger.claim([Claim(row.job_id) for row in rows[:64]], "bench", -1.0)

    yield "list", lambda: ledger.page(JobFilter(limit=100))
    yield "list by status", lambda: ledger.page(JobFilter(status=JobStatus.FAILED, limit=100))
    yield (
        "list by tenant and status",
        lambda: ledger.page(JobFilter(status=JobStatus.SUCCEEDED, tenant="t7", limit=100)),
    )
    yield "list by model, after", lambda: ledger.page(JobFilter(model="b", after=middle, limit=100))
    yield "get", lambda: ledger.get(newest[0].id)
    yield "submit", lambda: ledger.submit(request)
    yield "claim 64 raw, commit", claim_and_commit
    yield "claim 64 raw, renew, hand back", renew_and_hand_back
    yield "which of 100 have ended", lambda: ledger.ended(ended)
    yield "send a window, claim 64", relay
    yield "revocations", lambda: ledger.revocations(500)
    yield "reap", lambda: ledger.reap(500)
    yield "backlog", ledger.backlog
    yield "drains", lambda: ledger.drains(["a", "b"])
    yield "sent counts", ledger.sent_counts
    yield "counts", ledger.counts
    yield "counts of a tenant", lambda: ledger.counts("t7")
    yield "raise aged", lambda: ledger.raise_aged(60, Windows(128))
    yield "prune 500", lambda: ledger.prune(Retention(86_400.0 * 30, 86_400.0 * 90, 86_400.0 * 90), 500)
