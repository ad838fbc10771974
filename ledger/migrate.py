"""Alembic, run from the installed package: `upgrade(url)` is all that a deployment needs.

Processes may upgrade at the same time: the first one does it, in one transaction, and the others wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import text
from sqlalchemy.engine import Connection

from ledger.database import make_engine

_ADVISORY_LOCK = 0x68656164
_WAIT_S = 60.0
VERSION_TABLE = "headrace_alembic_version"
"""A name of our own: the database may be shared with an application that has its own migrations."""


class UnknownRevision(ValueError):
    """There is no such revision to go to."""


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the database up to `revision`; SQLite's file is made if it is missing."""
    with _naming(revision):
        _migrate(url, lambda config: command.upgrade(config, revision))


def downgrade(url: str, revision: str) -> None:
    """Take the database back to `revision` (`base` drops every table)."""
    with _naming(revision):
        _migrate(url, lambda config: command.downgrade(config, revision))


def check(revision: str) -> None:
    """Raise UnknownRevision unless a database can be taken to `revision`; how far a step leads only it can say."""
    if re.fullmatch(r"[+-]\d+", revision) is None:
        with _naming(revision):
            ScriptDirectory.from_config(_config()).get_revisions(revision)


def current(url: str) -> str | None:
    """The database's revision; None before the first upgrade."""
    engine = make_engine(url)
    try:
        with engine.execution_options(reads=True).begin() as connection:
            return revision(connection)
    finally:
        engine.dispose()


def revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


@cache
def head() -> str:
    """The revision that this code needs."""
    found = ScriptDirectory.from_config(_config()).get_current_head()
    if found is None:
        raise RuntimeError("the package `migrations` holds no migration")
    return found


@contextmanager
def _naming(revision: str) -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        raise UnknownRevision(f"there is no revision {revision!r}: {error}") from None


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(files("migrations")).replace("%", "%%"))
    return config


def _migrate(url: str, run: Callable[[Config], None]) -> None:
    engine = make_engine(url, busy_timeout_s=_WAIT_S, bounded=False)
    config = _config()
    try:
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.execute(text(f"SET LOCAL lock_timeout = '{int(_WAIT_S)}s'"))
                connection.execute(text("SET LOCAL statement_timeout = 0"))
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})"))
            config.attributes["connection"] = connection
            run(config)
    finally:
        engine.dispose()
