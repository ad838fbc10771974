"""The schema commands work on the database that the settings name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from ledger import migrate
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
