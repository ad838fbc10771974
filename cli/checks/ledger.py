"""The ledger: reachable, at the right revision, on the same clock, and working its outbox off."""

from __future__ import annotations

import time
from collections.abc import Iterator

from headrace.contract import JobStatus
from headrace.urls import masked
from sqlalchemy.exc import SQLAlchemyError

from cli.checks.broker import clock
from cli.checks.finding import Finding, Reporter
from cli.instance import ledger_url
from cli.output import Failure, first_line
from ledger import Ledger
from ledger.contract import LedgerUnavailable
from ledger.database import ledger_url as parse
from settings import Settings, is_loopback

ledger = Reporter("ledger")


def check_ledger(settings: Settings) -> list[Finding]:
    """Everything about the database; one failure if it can't be reached."""
    try:
        url = ledger_url(settings)
    except Failure as failure:
        return [ledger.fail(failure.message, failure.hint or "")]
    try:
        return list(_findings(url))
    except (LedgerUnavailable, SQLAlchemyError) as error:
        return [
            ledger.fail(
                f"the database at {masked(url)} can't be used: {first_line(error)}",
                "start it, or set HEADRACE_DATABASE_URL (or DATABASE_URL)",
            )
        ]


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
        yield ledger.ok(f"{jobs} jobs on record, {dead} of them failed")
        models = sorted(database.models())
        if models:
            yield ledger.ok(f"models announced: {', '.join(models)}")
        else:
            yield ledger.warn(
                "no model is announced, so the API refuses every job", "start a worker, or `headrace models register`"
            )
    finally:
        database.close()


def _encryption(url: str) -> Iterator[Finding]:
    parsed = parse(url)
    if parsed.get_backend_name() != "postgresql" or parsed.host is None or is_loopback(parsed.host):
        return
    if parsed.query.get("sslmode") not in ("require", "verify-ca", "verify-full"):
        yield ledger.warn(
            "the database is on another machine and may be reached without TLS",
            "add ?sslmode=verify-full&sslrootcert=... to its URL, unless the network between is your own",
        )
