"""A database that goes away and comes back."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

import sqlalchemy as sa


@contextmanager
def outage(database_url: str) -> Iterator[None]:
    """Nobody can write (SQLite: somebody keeps the write lock) or even connect (PostgreSQL) in the meantime."""
    url = sa.make_url(database_url)
    if url.get_backend_name() == "sqlite":
        assert url.database is not None
        with closing(sqlite3.connect(url.database, isolation_level=None, timeout=10)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.execute("ROLLBACK")
        return
    name = url.database
    server = sa.create_engine(url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(sa.text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false"))
        connection.execute(
            sa.text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"), {"name": name}
        )
        try:
            yield
        finally:
            connection.execute(sa.text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true"))
    server.dispose()
