"""The schema commands work on the database that the settings name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from headrace.contract import JobRequest
from typer.testing import CliRunner

from cli.main import app
from ledger import Ledger, migrate
from ledger.database import make_engine
from settings import get_settings

runner = CliRunner()


@pytest.fixture
def url(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_DATABASE_URL", database_url)
    get_settings.cache_clear()
    return database_url


def test_up_and_down(url: str) -> None:
    assert json.loads(runner.invoke(app, ["db", "current", "--json"]).output) == {
        "current": None,
        "needed": migrate.head(),
        "up_to_date": False,
    }
    for _ in range(2):
        up = runner.invoke(app, ["db", "upgrade"])
        assert up.exit_code == 0, up.output
        assert migrate.head() in up.output
    assert "up to date" in runner.invoke(app, ["db", "current"]).output
    assert runner.invoke(app, ["db", "downgrade", "base"], input="n\n").exit_code == 1
    assert migrate.current(url) == migrate.head()
    down = runner.invoke(app, ["db", "downgrade", "base", "--yes"])
    assert down.exit_code == 0, down.output
    assert migrate.current(url) is None


def test_an_unreachable_database_is_told_without_a_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_DATABASE_URL", "postgresql://nobody:secret@127.0.0.1:9/x")
    get_settings.cache_clear()
    result = runner.invoke(app, ["db", "upgrade"])
    assert result.exit_code == 1
    assert "HEADRACE_DATABASE_URL" in result.stderr
    assert "secret" not in result.output


def test_prune_says_what_it_would_remove_and_removes_it(url: str) -> None:
    migrate.upgrade(url)
    ledger = Ledger(url)
    job = ledger.submit(JobRequest(model="m", prompt="x")).job
    ledger.request_cancel([job.id])
    kept = ledger.submit(JobRequest(model="m", prompt="x")).job
    engine = make_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE jobs SET finished_at = '2020-01-01 00:00:00' WHERE finished_at IS NOT NULL"))
    engine.dispose()
    dry = json.loads(runner.invoke(app, ["db", "prune", "--dry-run", "--json"]).output)
    assert dry == {"dry_run": True, "jobs": 1, "dead_letters": 0, "keys": 0, "revocations": 0}
    assert ledger.get(job.id) is not None
    assert "removed 1 job, 0 dead letters, 0 keys" in runner.invoke(app, ["db", "prune"]).output
    assert ledger.get(job.id) is None
    assert ledger.get(kept.id) is not None
    ledger.close()


@pytest.mark.parametrize("arguments", [["upgrade", "nope"], ["downgrade", "nope"], ["downgrade", "-99", "--yes"]])
def test_a_revision_that_is_none_is_told_before_anything_is_asked(url: str, arguments: list[str]) -> None:
    migrate.upgrade(url)
    result = runner.invoke(app, ["db", *arguments])
    assert result.exit_code == 2, result.output
    assert f"there is no revision '{arguments[1]}'" in result.stderr
    assert "Go back" not in result.output
    assert migrate.current(url) == migrate.head()
