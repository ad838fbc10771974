"""The database's clock, and how moments are stored: UTC on both databases, aware datetimes in Python.

SQLite keeps text in the form that SQLAlchemy's own `DateTime` reads and writes (`2026-01-31 12:00:00.000000`), so
moments compare as strings and other tools can read them; its clock ticks in milliseconds.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BindParameter, Dialect, Float, bindparam, literal
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import DateTime, TypeDecorator


class UtcTime(TypeDecorator[datetime]):
    """A moment: an aware datetime, in UTC when it is read."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone")
        utc = value.astimezone(UTC)
        return utc.replace(tzinfo=None) if dialect.name == "sqlite" else utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class db_now(FunctionElement[datetime]):  # noqa: N801 (it reads as an SQL function)
    """The moment, `offset_s` seconds from now (a parameter, if that is one), on the database's clock.

    On PostgreSQL it is `statement_timestamp()`: unlike `now()` it moves on within a transaction, and unlike
    `clock_timestamp()` it is stable within a statement, so that comparisons with it can use an index.
    """

    type = UtcTime()
    inherit_cache = True

    def __init__(self, offset_s: float | BindParameter[float] = 0.0) -> None:
        if isinstance(offset_s, BindParameter):
            super().__init__(offset_s)
        else:
            super().__init__(*([literal(float(offset_s), Float)] if offset_s else []))


def seconds(name: str) -> BindParameter[float]:
    """A parameter that is a span of time."""
    return bindparam(name, type_=Float)


@compiles(db_now, "sqlite")
def _sqlite_now(element: db_now, compiler: SQLCompiler, **kw: Any) -> str:
    offset = compiler.process(element.clauses, **kw)
    shift = f", printf('%+.3f seconds', {offset})" if offset else ""
    return f"(strftime('%Y-%m-%d %H:%M:%f', 'now'{shift}) || '000')"


@compiles(db_now, "postgresql")
def _postgresql_now(element: db_now, compiler: SQLCompiler, **kw: Any) -> str:
    offset = compiler.process(element.clauses, **kw)
    shift = f" + make_interval(secs => CAST({offset} AS double precision))" if offset else ""
    return f"(statement_timestamp(){shift})"
