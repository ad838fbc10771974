"""The database's plans for the statements that a piece of work runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine

_EXPLAINED = re.compile(r"^\s*(SELECT|UPDATE|DELETE|WITH)\b", re.IGNORECASE)
_SCAN = re.compile(r"^\s*(?:->\s*)?(?:SCAN|Seq Scan on) (\w+)(?! USING)", re.MULTILINE)
TABLES = ("jobs", "results", "outbox")
"""Those that grow."""


@dataclass(slots=True)
class Plans:
    """Plans by statement."""

    engine: Engine
    found: dict[str, str] = field(default_factory=dict)

    def watch(self, work: Callable[[], object]) -> dict[str, str]:
        """Run the work; the plans of its statements, as the database would run them now."""
        ran: list[tuple[str, Any]] = []

        def note(_connection: Connection, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
            if _EXPLAINED.match(statement) and not isinstance(parameters, list):
                ran.append((statement, parameters))

        event.listen(self.engine, "before_cursor_execute", note)
        try:
            work()
        finally:
            event.remove(self.engine, "before_cursor_execute", note)
        return {statement: self._plan(statement, parameters) for statement, parameters in ran}

    def _plan(self, statement: str, parameters: Any) -> str:
        lite = self.engine.dialect.name == "sqlite"
        connection = self.engine.raw_connection()
        try:
            cursor = connection.cursor()
            if not lite:
                cursor.execute("SET LOCAL enable_seqscan = off")  # small tables are scanned whatever indexes they have
            cursor.execute(f"EXPLAIN {'QUERY PLAN ' if lite else ''}{statement}", parameters)
            return "\n".join(str(row[-1] if lite else row[0]) for row in cursor.fetchall())
        finally:
            connection.rollback()
            connection.close()


def scans(plan: str) -> set[str]:
    """The growing tables that a plan reads from end to end without an index."""
    return {table for table in _SCAN.findall(plan) if table in TABLES}


def analyze(engine: Engine) -> None:
    """Let the planner know how large the tables are."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("ANALYZE"))
