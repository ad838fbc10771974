"""The connection to the ledger's database: one engine, and transactions that are retried while that can help.

SQLite runs in WAL mode with `synchronous=NORMAL`: what was committed survives any death of a process. A loss of power
may take back the last commits (it never breaks the file); where that matters, the ledger belongs on PostgreSQL.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from headrace.urls import canonical, masked
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ledger.contract import LedgerMissing, LedgerUnavailable

T = TypeVar("T")

RETRY_FOR_S = 5.0
"""No further attempt of a transaction is begun after this long."""
BUSY_TIMEOUT_S = 5.0
"""How long SQLite waits for another writer in one attempt."""
LOOK_MS = 2
"""How long it waits at a stretch: after that it is asked again."""

_PG_TRANSIENT = frozenset({"40001", "40P01", "55P03", "57014", "57P01", "57P02", "57P03", "25006"})
"""Serialisation, deadlock, lock and statement timeout, shutdown and start-up, a server that only reads (a standby)."""
_PG_TRANSIENT_CLASSES = ("53", "58")
"""Out of a resource (disk, memory, connections), and an error of the system under the server."""


def ledger_url(url: str) -> URL:
    """The SQLAlchemy URL for what a user wrote; `postgres://` and `postgresql://` mean the psycopg driver."""
    parsed = sa.make_url(canonical(url))
    if parsed.drivername in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername == "postgresql+psycopg":
        return parsed
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        if parsed.database in (None, "", ":memory:"):
            raise ValueError("the ledger needs a file: an in-memory SQLite database forgets its jobs")
        if parsed.query:
            raise ValueError("a SQLite ledger takes no parameters: its URL ends with the file's name")
        return parsed
    raise ValueError(f"the ledger runs on sqlite:/// and postgresql://, not on {parsed.drivername}://")


def shown(url: URL) -> str:
    """The URL without what is secret in it."""
    return masked(url.render_as_string(hide_password=False))


def make_engine(url: str, busy_timeout_s: float = BUSY_TIMEOUT_S, bounded: bool = True) -> Engine:
    """An engine for the ledger's database. SQLite's file is made if missing, readable by its owner alone.

    `bounded` says whether PostgreSQL has to answer each statement within seconds.
    """
    target = ledger_url(url)
    if target.get_backend_name() == "sqlite":
        return _sqlite_engine(target, busy_timeout_s)
    from ledger.postgresql import postgresql_engine

    return postgresql_engine(target, RETRY_FOR_S, bounded)


def _sqlite_engine(url: URL, busy_timeout_s: float) -> Engine:
    path = Path(str(url.database))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    engine = sa.create_engine(url, hide_parameters=True, pool_size=8, max_overflow=24, pool_timeout=RETRY_FOR_S)

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {int(busy_timeout_s * 1000)}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get("reads", False):
            connection.exec_driver_sql("BEGIN")
        else:
            _await_turn(connection, busy_timeout_s)

    return engine


def _await_turn(connection: Connection, within_s: float) -> None:
    """Begin to write. SQLite would look for its one lock less and less often, in the end ten times a second."""
    give_up_s = time.monotonic() + within_s
    driver: Any = connection.connection.driver_connection
    driver.execute(f"PRAGMA busy_timeout = {LOOK_MS}")
    try:
        while time.monotonic() < give_up_s:
            try:
                driver.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    break
            else:
                return
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # what it raises is SQLAlchemy's
    finally:
        driver.execute(f"PRAGMA busy_timeout = {int(within_s * 1000)}")


def transient(error: DBAPIError) -> bool:
    """Whether the same transaction may succeed if it is run again soon."""
    if error.connection_invalidated:
        return True
    code = getattr(error.orig, "sqlstate", None)
    if code is not None:
        return code in _PG_TRANSIENT or code[:2] in _PG_TRANSIENT_CLASSES
    return isinstance(error, OperationalError | InterfaceError)


def missing_schema(error: DBAPIError) -> bool:
    if isinstance(error, ProgrammingError):
        return getattr(error.orig, "sqlstate", None) == "42P01"
    return isinstance(error, OperationalError) and "no such table" in str(error.orig)


class Database:
    """Runs functions of a connection, each in a transaction of its own, again if it failed for a passing reason.

    A function may thus run more than once, the last time after a commit that went through with its answer lost;
    each one is written so that this does no harm.
    """

    def __init__(self, url: str) -> None:
        self.url = ledger_url(url)
        self.engine = make_engine(url, BUSY_TIMEOUT_S)
        self._reader = self.engine.execution_options(reads=True)
        self._turn: threading.Lock | None = None
        if self.engine.dialect.name == "sqlite":
            self._turn = threading.Lock()
            """SQLite lets its writers poll for the one write lock, and some starve: threads queue up here instead."""

    def __repr__(self) -> str:
        return f"Database({shown(self.url)!r})"

    def __str__(self) -> str:
        return shown(self.url)

    def read(self, work: Callable[[Connection], T]) -> T:
        return self._run(self._reader, work)

    def write(self, work: Callable[[Connection], T]) -> T:
        if self._turn is None:
            return self._run(self.engine, work)
        if not self._turn.acquire(timeout=RETRY_FOR_S):
            raise LedgerUnavailable(f"{self}: other writers have kept it busy")
        try:
            return self._run(self.engine, work)
        finally:
            self._turn.release()

    def _run(self, engine: Engine, work: Callable[[Connection], T]) -> T:
        give_up_s = time.monotonic() + RETRY_FOR_S
        pause_s = 0.02
        while True:
            try:
                with engine.begin() as connection:
                    return work(connection)
            except PoolTimeout as error:
                raise LedgerUnavailable(f"{self}: no connection came free: {error}") from error
            except DBAPIError as error:
                if missing_schema(error):
                    raise LedgerMissing(f"{self} has no tables yet: migrate it first") from error
                if not transient(error):
                    raise
                if time.monotonic() + pause_s > give_up_s:
                    raise LedgerUnavailable(f"{self}: {error.orig}") from error
            time.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 (spreads competitors, no secret)
            pause_s = min(2 * pause_s, 0.5)

    def close(self) -> None:
        self.engine.dispose()
