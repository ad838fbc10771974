"""What only PostgreSQL can do to its clients: a deadlock."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest
from headrace.contract import JobRequest, JobResult, JobStatus

from ledger import Ledger
from ledger.contract import Claim, Outcome, Verdict
from ledger.migrate import upgrade
from tests.conftest import new_postgres_database
from tests.faults.postgres import PostgresServer

pytestmark = pytest.mark.slow


def test_a_deadlock_is_run_again(on_postgres: None, postgres_server: PostgresServer) -> None:
    """An administrator's session holds one job's row and wants another's, which a batch of commits holds."""
    url = new_postgres_database(postgres_server.url())
    upgrade(url)
    ledger = Ledger(url)
    ids = sorted(ledger.submit(JobRequest(model="m", prompt="x")).job.id for _ in range(2))
    leases = [claim.lease for claim in ledger.claim([Claim(job_id) for job_id in ids], "w", 60)]
    outcomes = [Outcome(lease, JobStatus.SUCCEEDED, JobResult(text="x")) for lease in leases if lease is not None]
    written: list[bool] = []
    with psycopg.connect(url.replace("+psycopg", "")) as session:
        session.execute("SET deadlock_timeout = '60s'")
        session.execute("SELECT 1 FROM jobs WHERE id = %s FOR UPDATE", (ids[1],))
        commit = threading.Thread(target=lambda: written.extend(ledger.commit(outcomes)))
        commit.start()
        time.sleep(0.5)
        session.execute("SELECT 1 FROM jobs WHERE id = %s FOR UPDATE", (ids[0],))
        session.rollback()
    commit.join(20)
    assert written == [True, True]
    with postgres_server.connect() as administrator:
        [deadlocks] = administrator.execute("SELECT sum(deadlocks) FROM pg_stat_database").fetchone() or [0]
    assert deadlocks
    assert [ledger.claim([Claim(job_id)], "w", 60)[0].verdict for job_id in ids] == [Verdict.TERMINAL] * 2
    ledger.check()
    ledger.close()
