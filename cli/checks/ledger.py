"""The ledger: reachable, at the right revision, on the same clock, and working its outbox off."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from headrace.contract import JobStatus, Reason
from headrace.counting import counted
from headrace.urls import masked
from sqlalchemy.exc import SQLAlchemyError

from cli.checks.broker import clock
from cli.checks.finding import Finding, Reporter
from cli.instance import ledger_url
from cli.output import Failure, first_line
from ledger import Ledger
from ledger.contract import JobFilter, LedgerUnavailable
from ledger.database import ledger_url as parse
from settings import Settings, is_loopback

ledger = Reporter("ledger")
STALE_S = 15.0
"""An outage's grace, and a few rounds of the reaper."""
MOST_LETTERS = 100
"""Dead letters that are counted."""


def check_ledger(settings: Settings) -> Iterator[Finding]:
    """Everything about the database; one failure if it can't be reached."""
    try:
        url = ledger_url(settings)
    except Failure as failure:
        yield ledger.fail(failure.message, failure.hint or "")
        return
    file = parse(url)
    if file.get_backend_name() == "sqlite" and not Path(str(file.database)).exists():  # connecting would make it
        yield ledger.fail(f"there is no database at {masked(url)} yet", "run `headrace db upgrade`")
        return
    try:
        yield from _findings(url)
    except (LedgerUnavailable, SQLAlchemyError) as error:
        yield ledger.fail(
            f"the database at {masked(url)} can't be used: {first_line(error)}",
            "start it, or set HEADRACE_DATABASE_URL (or DATABASE_URL)",
        )


def _findings(url: str) -> Iterator[Finding]:
    database = Ledger(url)
    try:
        present, needed = database.revision()
        if present is None:
            yield ledger.fail(f"the database at {masked(url)} has no tables", "run `headrace db upgrade`")
            return
        if present != needed:
            yield ledger.fail(
                f"the database is at revision {present}, this version needs {needed}", "run `headrace db upgrade`"
            )
            return
        yield ledger.ok(f"{masked(url)} is at revision {present}")
        yield from _encryption(url)
        before_s = time.time()
        now_s = database.now().timestamp()
        yield clock(ledger, "the database", now_s - (before_s + time.time()) / 2)
        counts = database.counts()
        dead = sum(by_status.get(JobStatus.FAILED, 0) for by_status in counts.values())
        jobs = sum(sum(by_status.values()) for by_status in counts.values())
        yield ledger.ok(f"{counted(jobs, 'job')} on record, {dead} failed")
        yield _leases(database)
        yield _dead_letters(database)
        models = sorted(database.models())
        if models:
            yield ledger.ok(f"models announced: {', '.join(models)}")
        else:
            yield ledger.warn(
                "no model is announced, so the API refuses every job", "start a worker, or `headrace models register`"
            )
    finally:
        database.close()


def _leases(database: Ledger) -> Finding:
    """Running jobs that nobody renews are queued again within seconds, if anybody looks after them."""
    stale = database.stale_leases(STALE_S)
    if not stale:
        return ledger.ok("no lease has run out unnoticed")
    return ledger.warn(
        f"{counted(stale, 'running job has', 'running jobs have')} had no worker for more than {STALE_S:g} s, "
        "and nobody looks after such jobs",
        "no relay runs: start the API or a worker, and look at their logs",
    )


def _dead_letters(database: Ledger) -> Finding:
    """Jobs that wait for somebody to look at them."""
    page = database.page(JobFilter(reason=Reason.DEAD_LETTER, limit=MOST_LETTERS))
    if not page.data:
        return ledger.ok("no dead letter")
    count = f"{len(page.data)} or more" if page.has_more else str(len(page.data))
    return ledger.warn(
        f"dead letters: {count}; each lost its worker at every attempt",
        "`headrace dlq list` and `headrace dlq show JOB`, then replay or purge them",
    )


def check_spool(settings: Settings) -> Iterator[Finding]:
    """Outcomes on this host's disk that the database hasn't got."""
    files = list((settings.home / "spool").glob("*.jsonl"))
    outcomes = 0
    for file in files:
        with suppress(OSError):
            outcomes += file.read_bytes().count(b"\n")
    if not outcomes:
        yield ledger.ok("no outcome waits on this host's disk")
    else:
        yield ledger.warn(
            f"{counted(outcomes, 'outcome waits', 'outcomes wait')} in {settings.home / 'spool'} for the database",
            "bring it back and keep a worker running here with this home: it writes them by itself",
        )


def _encryption(url: str) -> Iterator[Finding]:
    parsed = parse(url)
    if parsed.get_backend_name() != "postgresql" or parsed.host is None or is_loopback(parsed.host):
        return
    if parsed.query.get("sslmode") not in ("require", "verify-ca", "verify-full"):
        yield ledger.warn(
            "the database is on another machine and may be reached without TLS",
            "add ?sslmode=verify-full&sslrootcert=... to its URL, unless the network between is your own",
        )
