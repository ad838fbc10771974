"""No method that runs often reads a table that grows from end to end."""

from __future__ import annotations

import re

import pytest

from bench.parts.rows import fill, methods
from bench.plans import Plans, scans
from ledger import Ledger

WHOLE = {"counts", "counts of a tenant"}
"""These count every job there is, by an index that holds what they need where there is one."""


@pytest.mark.slow
def test_every_statement_finds_its_rows_by_an_index(ledger: Ledger) -> None:
    fill(ledger, 3000)
    plans = Plans(ledger._database.engine)
    bad = {
        (what, statement): plan
        for what, method in methods(ledger)
        if what not in WHOLE
        for statement, plan in plans.watch(method).items()
        if scans(plan)
    }
    assert not bad, "\n\n".join(f"{what}: {statement}\n{plan}" for (what, statement), plan in bad.items())


BY_ID = re.compile(r"jobs\.id (=|IN) ")
IN_STATE = re.compile(r"SEARCH jobs USING .*\bix_jobs_\w*status")


@pytest.mark.slow
def test_jobs_that_are_named_are_looked_up_and_not_searched_for_by_their_state(ledger: Ledger) -> None:
    """With a million jobs that have ended, a search took a second each time, and prunes kept the lock for that long."""
    if ledger._database.engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL knows how many there are in a state, and may well search the few that run")
    fill(ledger, 3000)
    plans = Plans(ledger._database.engine)
    asked = [
        (what, statement, plan)
        for what, method in methods(ledger)
        for statement, plan in plans.watch(method).items()
        if BY_ID.search(statement.partition("WHERE")[2])
    ]
    assert {"prune 500", "which of 100 have ended", "claim 64 raw, renew, hand back"} <= {what for what, *_ in asked}
    bad = [(what, statement[:300], plan) for what, statement, plan in asked if IN_STATE.search(plan)]
    assert not bad, bad


@pytest.mark.slow
def test_the_reaper_reads_what_is_late_and_nothing_else(ledger: Ledger) -> None:
    """Each second: with many jobs that wait, to look through them all takes long."""
    if ledger._database.engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL knows how few they are")
    fill(ledger, 3000)
    plans = Plans(ledger._database.engine).watch(lambda: (ledger.reap(), ledger.stale_leases(0.5)))
    late = {name for plan in plans.values() for name in re.findall(r"ix_jobs_(\w+) \(status=\? AND \w+<\?\)", plan)}
    assert late == {"deadline", "lease"}
    assert not any("TEMP B-TREE" in plan for plan in plans.values())


def test_a_scan_is_told_from_a_search() -> None:
    assert scans("SCAN jobs") == {"jobs"}
    assert scans("SCAN jobs USING INDEX ix_jobs_created") == set()
    assert scans("SEARCH jobs USING INDEX ix_jobs_lease (lease_until<?)\nSCAN roles") == set()
    assert scans("Limit  (cost=0.1)\n  ->  Seq Scan on outbox  (cost=0.0)") == {"outbox"}
