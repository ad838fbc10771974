"""Migrations: up, down, up; what they make is what the models say."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from headrace.contract import JobRequest, JobStatus

from ledger import Ledger, migrate
from ledger.database import make_engine
from ledger.models import Base


def tables(url: str) -> set[str]:
    engine = make_engine(url)
    names = set(sa.inspect(engine).get_table_names()) - {migrate.VERSION_TABLE}
    engine.dispose()
    return names


def test_up_down_up_on_an_empty_database(database_url: str) -> None:
    assert migrate.current(database_url) is None
    for _ in range(2):
        migrate.upgrade(database_url)
        assert migrate.current(database_url) == migrate.head()
        assert tables(database_url) == set(Base.metadata.tables)
        migrate.downgrade(database_url, "base")
        assert migrate.current(database_url) is None
        assert tables(database_url) == set()


def test_up_down_up_on_a_filled_database(ledger: Ledger, desk: Any, migrated_url: str) -> None:
    done, waiting = desk.succeeded(), desk.queued()
    migrate.upgrade(migrated_url)
    assert ledger.get(done).status is JobStatus.SUCCEEDED
    assert desk.topics(waiting) == ["publish"]
    migrate.downgrade(migrated_url, "base")
    migrate.upgrade(migrated_url)
    assert ledger.submit(JobRequest(model="m", prompt="x")).created
    assert ledger.get(done) is None


def test_the_ledger_knows_its_revision_and_the_one_it_needs(ledger: Ledger) -> None:
    assert ledger.revision() == (migrate.head(), migrate.head())


def test_models_and_migrations_agree(migrated_url: str) -> None:
    engine = make_engine(migrated_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={"compare_type": True, "compare_server_default": True, "version_table": migrate.VERSION_TABLE},
        )
        assert compare_metadata(context, Base.metadata) == []
        inspector = sa.inspect(connection)
        for name, table in Base.metadata.tables.items():
            wanted = {c.name for c in table.constraints if isinstance(c, sa.CheckConstraint)}
            assert {check["name"] for check in inspector.get_check_constraints(name)} == wanted
            partial = {
                index.name: str(index.dialect_options[engine.dialect.name]["where"])
                for index in table.indexes
                if index.dialect_options[engine.dialect.name]["where"] is not None
            }
            made = {
                index["name"]: index["dialect_options"][f"{engine.dialect.name}_where"]
                for index in inspector.get_indexes(name)
                if f"{engine.dialect.name}_where" in index["dialect_options"]
            }
            assert set(made) == set(partial)
            for index, condition in partial.items():
                assert set(re.findall(r"\w+", condition)) <= set(re.findall(r"\w+", str(made[index])))
    engine.dispose()


@pytest.mark.slow
def test_processes_may_upgrade_at_the_same_time(database_url: str) -> None:
    script = "import sys; from ledger import migrate; migrate.upgrade(sys.argv[1])"
    running = [subprocess.Popen([sys.executable, "-c", script, database_url]) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert migrate.current(database_url) == migrate.head()
    ledger = Ledger(database_url)
    assert ledger.submit(JobRequest(model="m", prompt="x")).created
    ledger.close()
