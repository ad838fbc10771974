"""The statements that run often are served by an index, however many jobs have ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from headrace.contract import JobRequest, JobStatus

from ledger import Ledger
from ledger.contract import Claim, JobFilter

Call = Callable[[Ledger, str], object]

CALLS: dict[str, Call] = {
    "get": lambda ledger, job_id: ledger.get(job_id),
    "claim": lambda ledger, job_id: ledger.claim([Claim(job_id)], "w", 9),
    "cancel": lambda ledger, job_id: ledger.request_cancel([job_id]),
    "submit": lambda ledger, _: ledger.submit(JobRequest(model="m", prompt="x", idempotency_key="k")),
    "reap": lambda ledger, _: ledger.reap(),
    "queued": lambda ledger, _: ledger.queued("m", 0, 10),
    "sent_counts": lambda ledger, _: ledger.sent_counts(),
    "outbox": lambda ledger, _: ledger.outbox(10),
    "page": lambda ledger, _: ledger.page(JobFilter()),
    "page_after": lambda ledger, job_id: ledger.page(JobFilter(after=job_id)),
    "page_tenant": lambda ledger, job_id: ledger.page(JobFilter(tenant="t1", after=job_id)),
    "page_status": lambda ledger, job_id: ledger.page(JobFilter(status=JobStatus.FAILED, after=job_id)),
    "page_tenant_status": lambda ledger, _: ledger.page(JobFilter(tenant="t1", status=JobStatus.FAILED)),
    "page_model": lambda ledger, job_id: ledger.page(JobFilter(model="m", after=job_id)),
}

MANY = 20_000


@pytest.fixture
def filled(ledger: Ledger, desk: Any, sql: Any) -> Ledger:
    """A ledger with many ended jobs and a few live ones."""
    desk.failed(tenant="t1")
    postgresql = ledger._database.engine.dialect.name == "postgresql"
    later = "created_at + n * interval '1 millisecond'" if postgresql else "datetime(created_at, n || ' seconds')"
    sql(
        f"""
        WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {MANY})
        INSERT INTO jobs (id, tenant, model, status, priority, attempt, max_attempts, fence, cancel_requested,
            created_at, accepted_at, queued_at, finished_at, error_code, metadata)
        SELECT 'done-' || n, 't' || n % 50, 'm' || n % 5, 'failed', 'normal', 1, 3, 1, false,
            {later}, accepted_at, queued_at, finished_at, 'engine_error', metadata
        FROM jobs, numbers
        """
    )
    for _ in range(3):
        desk.queued(ttl_s=60)
        desk.running()
    if postgresql:
        sql("ANALYZE")  # as autovacuum does; SQLite plans without statistics unless somebody asks for them
    return ledger


def plans(ledger: Ledger, work: Callable[[], object]) -> list[str]:
    """The query plan of each statement that `work` runs, on its own connection and with its own parameters."""
    found: list[str] = []
    engine = ledger._database.engine
    postgresql = engine.dialect.name == "postgresql"

    def explain(connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        if many or statement.lstrip().split()[0] not in ("SELECT", "UPDATE", "DELETE", "INSERT"):
            return
        cursor = connection.connection.cursor()
        cursor.execute(("EXPLAIN " if postgresql else "EXPLAIN QUERY PLAN ") + statement, parameters)
        found.append("\n".join(str(row[-1]) for row in cursor.fetchall()) + "\n<- " + statement)
        cursor.close()

    sa.event.listen(engine, "before_cursor_execute", explain)
    try:
        work()
    finally:
        sa.event.remove(engine, "before_cursor_execute", explain)
    return found


def test_no_statement_reads_all_jobs(filled: Ledger, desk: Any) -> None:
    job_id = desk.queued(tenant="t1")
    for name, call in CALLS.items():
        explained = plans(filled, lambda call=call: call(filled, job_id))
        assert explained, name
        for plan in explained:
            whole = "Seq Scan on jobs" in plan or any(
                line.startswith("SCAN jobs") and "USING" not in line for line in plan.splitlines()
            )
            assert not whole, f"{name}: {plan}"
            sorts = "USE TEMP B-TREE FOR ORDER BY" in plan
            assert not (sorts and name.startswith("page")), f"{name}: {plan}"


def test_the_scan_is_seen(filled: Ledger) -> None:
    """The check above can fail: a condition with no index shows as a scan."""
    data = filled._database
    [plan] = [
        plan
        for plan in plans(
            filled, lambda: data.read(lambda c: c.execute(sa.text("SELECT id FROM jobs WHERE raw = 'x'")))
        )
        if "raw" in plan
    ]
    assert "Seq Scan on jobs" in plan or "SCAN jobs" in plan
