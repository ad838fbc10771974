"""What the database itself saw of every job: a trigger writes down each change of state or hands, whoever made it.

The ledger keeps only what is true now. That an end was written once, and that no state went backwards, is to be seen
only by somebody who watched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import sqlalchemy as sa
from headrace.contract import JobStatus

from ledger.database import Database
from ledger.states import TRANSITIONS

_TABLE = "CREATE TABLE witness (n {serial}, job_id TEXT, was TEXT, status TEXT, at DOUBLE PRECISION)"
_SQLITE = """
CREATE TRIGGER witness_{event} AFTER {event} ON jobs {when} BEGIN
  INSERT INTO witness (job_id, was, status, at)
  VALUES (NEW.id, {was}, NEW.status, (julianday('now') - 2440587.5) * 86400);
END
"""
_POSTGRESQL = (
    """
CREATE FUNCTION witness() RETURNS trigger AS $$ BEGIN
  IF TG_OP = 'INSERT' OR OLD.status <> NEW.status OR OLD.fence <> NEW.fence THEN
    INSERT INTO witness (job_id, was, status, at) VALUES
      (NEW.id, CASE WHEN TG_OP = 'UPDATE' THEN OLD.status END, NEW.status, extract(epoch FROM clock_timestamp()));
  END IF;
  RETURN NEW;
END $$ LANGUAGE plpgsql
""",
    "CREATE TRIGGER witness AFTER INSERT OR UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION witness()",
)


class Seen(NamedTuple):
    """One change of a job's state; `was` is None for the first."""

    was: JobStatus | None
    status: JobStatus
    at: datetime


class Witness:
    """Watches the jobs of one migrated database from now on."""

    def __init__(self, database_url: str) -> None:
        self._database = Database(database_url)
        engine = self._database.engine
        sqlite = engine.dialect.name == "sqlite"
        with engine.begin() as connection:
            serial = "INTEGER PRIMARY KEY AUTOINCREMENT" if sqlite else "BIGSERIAL PRIMARY KEY"
            connection.exec_driver_sql(_TABLE.format(serial=serial))
            if sqlite:
                insert = _SQLITE.format(event="INSERT", when="", was="NULL")
                update = _SQLITE.format(
                    event="UPDATE", when="WHEN OLD.status <> NEW.status OR OLD.fence <> NEW.fence", was="OLD.status"
                )
                for statement in (insert, update):
                    connection.exec_driver_sql(statement)
            else:
                for statement in _POSTGRESQL:
                    connection.exec_driver_sql(statement)

    def stories(self) -> Mapping[str, list[Seen]]:
        """The changes of each job, in their order."""
        asked = sa.text("SELECT job_id, was, status, at FROM witness ORDER BY n")
        told: dict[str, list[Seen]] = defaultdict(list)
        for row in self._database.read(lambda connection: connection.execute(asked).all()):
            was = JobStatus(row.was) if row.was is not None else None
            told[row.job_id].append(Seen(was, JobStatus(row.status), datetime.fromtimestamp(row.at, UTC)))
        return told

    def close(self) -> None:
        self._database.close()


def contradictions(stories: Mapping[str, list[Seen]], job_ids: Iterable[str]) -> list[str]:
    """What is wrong with the stories of these jobs: not one end, or a step that is no legal one."""
    wrong = []
    for job_id in job_ids:
        story = stories.get(job_id, [])
        ends = [seen for seen in story if seen.status.terminal]
        if len(ends) != 1 or story[-1] != ends[0]:
            wrong.append(f"{job_id} ended {len(ends)} times: {' '.join(seen.status for seen in story)}")
        wrong += [
            f"{job_id} went from {seen.was} to {seen.status}"
            for seen in story
            if seen.was is not None and seen.status not in TRANSITIONS[seen.was]
        ]
    return wrong
