"""Statements that run for thousands of rows a second: compiled once, and given values that are encoded here.

SQLAlchemy takes longer to encode a row's parameters than the databases take for the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from pydantic_core import to_json
from sqlalchemy import JSON, BindParameter, ClauseElement, Connection, Dialect, Text, bindparam
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import Enum, TypeDecorator, TypeEngine

from ledger.clock import UtcTime
from ledger.models import PlainText

Encoder = Callable[[Any], Any]


class _Ids(TypeDecorator[Sequence[str]]):
    """Any number of ids in one parameter."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(Text() if dialect.name == "sqlite" else ARRAY(Text))

    def process_bind_param(self, value: Sequence[str] | None, dialect: Dialect) -> Any:
        ids = [_plain(job_id) for job_id in value or ()]
        return to_json(ids).decode() if dialect.name == "sqlite" else ids


class one_of(FunctionElement[Any]):  # noqa: N801 (it reads as an SQL operator)
    """Whether the column is one of those in the parameter `ids`. The statement's text is the same for any number.

    Its type isn't boolean: SQLite would be asked whether it `= 1`, and not use an index.
    """

    inherit_cache = True

    def __init__(self, column: InstrumentedAttribute[str]) -> None:
        super().__init__(column, bindparam("ids", type_=_Ids()))


@compiles(one_of, "sqlite")
def _sqlite_one_of(element: one_of, compiler: SQLCompiler, **kw: Any) -> str:
    column, ids = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"{column} IN (SELECT value FROM json_each({ids}))"  # noqa: S608 (both are compiled)


@compiles(one_of, "postgresql")
def _postgresql_one_of(element: one_of, compiler: SQLCompiler, **kw: Any) -> str:
    column, ids = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"{column} = ANY({ids})"


def given(table: type[DeclarativeBase], names: Iterable[str]) -> dict[str, BindParameter[Any]]:
    """A parameter for each of these columns, by the column's name."""
    return {name: bindparam(name, type_=table.__table__.c[name].type) for name in names}


class ForEach:
    """A statement to be executed for each of many rows. Its parameters are named, and typed, by `bindparam`."""

    def __init__(self, statement: ClauseElement) -> None:
        self._statement = statement
        self._compiled: dict[str, _Compiled] = {}

    def run(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> int:
        """How many rows of the table were written. What a row doesn't name is NULL."""
        name = connection.dialect.name
        if name not in self._compiled:
            self._compiled[name] = _Compiled(self._statement, connection.dialect)
        compiled = self._compiled[name]
        return connection.exec_driver_sql(compiled.text, compiled.parameters(rows)).rowcount


class _Compiled:
    """The statement's text for one database, and how its values are encoded there."""

    def __init__(self, statement: ClauseElement, dialect: Dialect) -> None:
        compiled: Any = statement.compile(dialect=dialect)
        self.text = str(compiled)
        self._names: list[str] = compiled.positiontup if compiled.positional else list(compiled.params)
        self._by_place = compiled.positional
        self._constants = dict(compiled.params)
        types = {name: bind.type for bind, name in compiled.bind_names.items()}
        found = ((place, encoder(types[name], dialect)) for place, name in enumerate(self._names))
        self._encoders = [(place, encode) for place, encode in found if encode is not None]

    def parameters(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        pick = itemgetter(*self._names)
        values = [list(pick({**self._constants, **row})) for row in rows]
        for place, encode in self._encoders:
            for row in values:
                if row[place] is not None:
                    row[place] = encode(row[place])
        return [tuple(row) if self._by_place else dict(zip(self._names, row, strict=True)) for row in values]


def encoder(kind: TypeEngine[Any], dialect: Dialect) -> Encoder | None:
    """What a value of this type becomes before the driver gets it; None if nothing."""
    if isinstance(kind, JSON):
        return _json
    if isinstance(kind, Enum):
        return str
    if isinstance(kind, PlainText):
        return _plain
    return _sqlite_moment if isinstance(kind, UtcTime) and dialect.name == "sqlite" else None


def _json(value: Any) -> str:
    return to_json(value).decode()


def _plain(value: str) -> str:
    return value.replace("\0", "\ufffd")


def _sqlite_moment(value: datetime) -> str:
    """As `ledger.clock` describes it."""
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")
