"""Engines, URLs, and transactions that are run again."""

from __future__ import annotations

import logging
import socket
import sqlite3
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from headrace.contract import JobRequest
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from ledger import Ledger, database, migrate
from ledger.contract import LedgerUnavailable
from ledger.database import Database, ledger_url
from tests.outage import outage


@pytest.mark.parametrize(
    ("given", "driver"),
    [
        ("postgres://u:p@h/d", "postgresql+psycopg"),
        ("postgresql://u:p@h/d", "postgresql+psycopg"),
        ("postgresql+psycopg://u:p@h/d", "postgresql+psycopg"),
        ("sqlite:////tmp/x.sqlite3", "sqlite"),
    ],
)
def test_urls_that_people_write(given: str, driver: str) -> None:
    assert ledger_url(given).drivername == driver


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://h/d", "redis://h/0"])
def test_urls_that_are_no_ledger(url: str) -> None:
    with pytest.raises(ValueError, match="the ledger"):
        ledger_url(url)


def test_sqlite_directory_and_file_are_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.sqlite3"
    url = f"sqlite:///{path}"
    migrate.upgrade(url)
    ledger = Ledger(url)
    ledger.submit(JobRequest(model="m", prompt="secret"))
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert (path.parent / "ledger.sqlite3-wal").exists()
    ledger.close()


def test_sqlite_is_set_up_on_every_connection(tmp_path: Path) -> None:
    engine = database.make_engine(f"sqlite:///{tmp_path / 'l.sqlite3'}")
    with engine.connect() as first, engine.connect() as second:
        for connection in (first, second):
            pragmas = {
                name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
            }
            assert pragmas == {"journal_mode": "wal", "synchronous": 1, "foreign_keys": 1, "busy_timeout": 5000}
            connection.rollback()
    engine.dispose()


def test_a_reader_does_not_wait_for_a_writer(migrated_url: str) -> None:
    data = Database(migrated_url)
    with data.engine.begin() as writer:
        writer.execute(sa.text("UPDATE jobs SET model = 'x'"))
        began_s = time.monotonic()
        assert data.read(lambda c: c.execute(sa.text("SELECT count(*) FROM jobs")).scalar()) == 0
        assert time.monotonic() - began_s < 1
    data.close()


def test_no_password_is_shown(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "RETRY_FOR_S", 0.2)
    caplog.set_level(logging.DEBUG)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"postgresql://user:hunter2@127.0.0.1:{closed.getsockname()[1]}/db?connect_timeout=1"
        ledger = Ledger(url)
        assert "hunter2" not in repr(ledger)
        with pytest.raises(LedgerUnavailable) as refused:
            ledger.now()
    error: BaseException | None = refused.value
    while error is not None:
        assert "hunter2" not in f"{error!r} {error}"
        error = error.__cause__
    assert "hunter2" not in caplog.text
    ledger.close()


def test_an_unreachable_database_is_unavailable_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "RETRY_FOR_S", 0.5)
    ledger = Ledger("postgresql://u@127.0.0.1:1/db")
    began_s = time.monotonic()
    with pytest.raises(LedgerUnavailable):
        ledger.get("x")
    assert 0.2 < time.monotonic() - began_s < 5
    ledger.close()


def test_a_database_without_tables_is_unavailable_and_says_why(database_url: str) -> None:
    ledger = Ledger(database_url)
    with pytest.raises(LedgerUnavailable, match="migrate"):
        ledger.submit(JobRequest(model="m", prompt="x"))
    assert ledger.revision() == (None, migrate.head())
    ledger.close()


def test_a_passing_failure_is_run_again(migrated_url: str) -> None:
    """Another process holds SQLite's write lock for a while, or PostgreSQL ends the connection."""
    data = Database(migrated_url)
    tries = []

    def work(connection: Connection) -> str:
        tries.append(1)
        if len(tries) == 1 and connection.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))
        if len(tries) == 1:
            raise sa.exc.OperationalError("x", {}, sqlite3.OperationalError("database is locked"))
        return "done"

    assert data.write(work) == "done"
    assert len(tries) == 2
    data.close()


def test_a_lasting_mistake_is_not_run_again(migrated_url: str) -> None:
    data = Database(migrated_url)
    tries = []

    def work(connection: Connection) -> None:
        tries.append(1)
        connection.execute(
            sa.text("INSERT INTO outbox (job_id, topic, due_at) VALUES ('none', 'publish', '2026-01-01')")
        )

    with pytest.raises(IntegrityError):
        data.write(work)
    assert len(tries) == 1
    data.close()


def test_a_failed_transaction_leaves_nothing(migrated_url: str) -> None:
    data = Database(migrated_url)

    def work(connection: Connection) -> None:
        connection.execute(sa.text("INSERT INTO roles VALUES ('r', 'o', '2026-01-01 00:00:00.000000')"))
        raise KeyError("stop")

    with pytest.raises(KeyError):
        data.write(work)
    assert data.read(lambda c: c.execute(sa.text("SELECT count(*) FROM roles")).scalar()) == 0
    data.close()


def test_sqlite_waits_for_another_process(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'l.sqlite3'}"
    migrate.upgrade(url)
    ledger = Ledger(url)
    other = sqlite3.connect(tmp_path / "l.sqlite3", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.5, lambda: other.execute("COMMIT"))
    timer.start()
    assert ledger.submit(JobRequest(model="m", prompt="x")).created
    timer.join()
    other.close()
    ledger.close()


def test_writers_that_wait_for_a_locked_database_give_up_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "RETRY_FOR_S", 0.5)
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.5)
    url = f"sqlite:///{tmp_path / 'l.sqlite3'}"
    migrate.upgrade(url)
    ledger = Ledger(url)

    def submit(_: int) -> str:
        with pytest.raises(LedgerUnavailable) as refused:
            ledger.submit(JobRequest(model="m", prompt="x"))
        return str(refused.value)

    with outage(url), ThreadPoolExecutor(10) as pool:
        began_s = time.monotonic()
        told = list(pool.map(submit, range(10)))
        assert time.monotonic() - began_s < 3
    assert any("kept it busy" in message for message in told)
    assert ledger.submit(JobRequest(model="m", prompt="x")).created
    ledger.close()


def test_connections_that_died_in_the_pool_are_replaced(migrated_url: str) -> None:
    """After a restart of PostgreSQL no caller sees an error. (SQLite has no connection to lose.)"""
    ledger = Ledger(migrated_url)
    job_id = ledger.submit(JobRequest(model="m", prompt="x")).job.id
    other = database.make_engine(migrated_url)
    if other.dialect.name == "postgresql":
        with other.begin() as connection:
            ended = sa.text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            assert connection.execute(ended).scalars().all() == [True]
    job = ledger.get(job_id)
    assert job is not None
    assert job.id == job_id
    other.dispose()
    ledger.close()
