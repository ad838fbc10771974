"""A PostgreSQL whose processes are stopped: the kernel still acknowledges every packet for them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from headrace.contract import JobRequest

from ledger import Ledger, migrate, postgresql
from ledger.contract import LedgerUnavailable
from tests.conftest import new_postgres_database

pytestmark = pytest.mark.slow


@pytest.fixture
def frozen_url(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database of the test's own; its clients lose their patience soon."""
    url = new_postgres_database(postgres_url)
    migrate.upgrade(url)
    monkeypatch.setattr(postgresql, "SILENCE_S", 1.0)
    monkeypatch.setattr(postgresql, "PING_S", 0.5)
    monkeypatch.setattr(postgresql, "CONNECT_S", 2)
    monkeypatch.setattr("ledger.database.RETRY_FOR_S", 0.5)
    return url


@contextmanager
def stopped(ledger: Ledger) -> Iterator[None]:
    """All of the server's processes sleep."""
    with ledger._database.engine.connect() as connection:
        directory = connection.execute(sa.text("SHOW data_directory")).scalar_one()
        backends = connection.execute(sa.text("SELECT pid FROM pg_stat_activity WHERE pid IS NOT NULL")).scalars().all()
    pids = [int(Path(directory, "postmaster.pid").read_text().split()[0]), *backends]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("idle_s", [0.0, 60.0])
def test_a_frozen_server_is_away_within_seconds_and_used_again_when_it_thaws(
    frozen_url: str, monkeypatch: pytest.MonkeyPatch, idle_s: float
) -> None:
    """Whether the connection is asked first, or its statement goes unanswered."""
    monkeypatch.setattr(postgresql, "IDLE_S", idle_s)
    ledger = Ledger(frozen_url)
    job_id = ledger.submit(JobRequest(model="m", prompt="x")).job.id
    with stopped(ledger):
        for _ in range(2):
            began_s = time.monotonic()
            with pytest.raises(LedgerUnavailable):
                ledger.get(job_id)
            assert time.monotonic() - began_s < 5
    found = ledger.get(job_id)
    assert found is not None
    assert ledger.submit(JobRequest(model="m", prompt="y")).created
    ledger.close()
