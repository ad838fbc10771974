"""The key commands work on the ledger that the settings name, and show a token once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cli.keys import seconds
from cli.main import app
from ledger import Ledger
from settings import get_settings

runner = CliRunner()


@pytest.fixture
def ledger(migrated_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_DATABASE_URL", migrated_url)
    get_settings.cache_clear()
    return Ledger(migrated_url)


def token_of(*arguments: str) -> str:
    done = runner.invoke(app, ["keys", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


def test_a_key_from_its_making_to_its_end(ledger: Ledger) -> None:
    token = token_of("create", "--tenant", "shop", "--name", "a [red] one", "--scope", "read", "--expires", "30d")
    [key] = ledger.keys.list(usable=True)
    assert key.matches(token)
    listed = runner.invoke(app, ["keys", "list"])
    assert f"hr_{key.id}" in listed.stdout
    assert "a [red] one" in listed.stdout
    assert token not in listed.output

    successor = token_of("rotate", f"hr_{key.id}", "--overlap", "2h")
    assert {found.matches(successor) for found in ledger.keys.list(usable=True)} == {True, False}
    assert runner.invoke(app, ["keys", "revoke", token, successor]).exit_code == 0
    assert ledger.keys.list(usable=True) == []
    assert runner.invoke(app, ["keys", "list"]).stdout == "no keys\n"
    shown = json.loads(runner.invoke(app, ["keys", "list", "--all", "--json"]).stdout)
    assert len(shown) == 2
    assert all(each["revoked_at"] for each in shown)
    assert "digest" not in shown[0]


def test_json_holds_the_token_once(ledger: Ledger) -> None:
    made = json.loads(token_of("create", "--json", "--requests-per-minute", "5", "--tokens-per-minute", "70"))
    [key] = ledger.keys.list()
    assert key.matches(made["token"])
    assert (key.tenant, key.requests_per_minute, key.tokens_per_minute) == ("default", 5, 70)


@pytest.mark.parametrize(
    "arguments",
    [
        ["create", "--scope", "fly"],
        ["create", "--tenant", "a b"],
        ["create", "--expires", "soon"],
        ["create", "--expires", "999999999w"],
        ["create", "--name", "x" * 129],
        ["create", "--requests-per-minute", "0"],
        ["rotate", "nonsense"],
        ["rotate", "0" * 16, "--overlap", "-1h"],
        ["revoke", "hr_xyz"],
    ],
)
def test_wrong_usage_makes_no_key(ledger: Ledger, arguments: list[str]) -> None:
    assert runner.invoke(app, ["keys", *arguments]).exit_code == 2
    assert ledger.keys.list() == []


@pytest.mark.parametrize("command", ["revoke", "rotate"])
def test_an_unknown_key_is_told(ledger: Ledger, command: str) -> None:
    done = runner.invoke(app, ["keys", command, "0" * 16])
    assert done.exit_code == 1
    assert "there is no API key" in done.stderr


def test_lengths_of_time() -> None:
    assert [seconds(text) for text in ("90s", "1.5m", "12h", "30d", "2w")] == [90, 90, 43_200, 2_592_000, 1_209_600]
    for text in ("", "5", "d", "1y", "-1d", "1e9d", " 1d"):
        with pytest.raises(typer.BadParameter):
            seconds(text)


def test_the_api_does_not_start_for_others_without_a_key(ledger: Ledger) -> None:
    refused = runner.invoke(app, ["api", "--host", "0.0.0.0", "--port", "0"])
    assert refused.exit_code == 1
    assert "there is no API key" in refused.stderr
    assert "headrace keys create" in refused.stderr


@pytest.mark.parametrize("auth", ["keys", "none"])
def test_the_api_starts_for_others_when_told_to(ledger: Ledger, auth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from settings import Settings

    started: list[Settings] = []
    monkeypatch.setattr("api.main.run_api", started.append)
    assert runner.invoke(app, ["api", "--host", "0.0.0.0", "--port", "0", "--auth", auth]).exit_code == 0
    assert started[0].api.needs_keys is (auth == "keys")


def test_the_api_starts_for_others_with_a_key(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    from settings import Settings

    token_of("create")
    started: list[Settings] = []
    monkeypatch.setattr("api.main.run_api", started.append)
    assert runner.invoke(app, ["api", "--host", "0.0.0.0", "--port", "0"]).exit_code == 0
    assert started[0].api.needs_keys


@pytest.mark.parametrize(
    ("host", "auth", "needed"),
    [
        ("127.0.0.1", "auto", False),
        ("127.8.9.1", "auto", False),
        ("::1", "auto", False),
        ("localhost", "auto", False),
        ("0.0.0.0", "auto", True),
        ("::", "auto", True),
        ("10.0.0.1", "auto", True),
        ("api.example.com", "auto", True),
        ("127.0.0.1", "keys", True),
        ("0.0.0.0", "none", False),
    ],
)
def test_when_keys_are_asked_for(host: str, auth: str, needed: bool) -> None:
    from settings import ApiSettings

    assert ApiSettings.model_validate({"host": host, "auth": auth}).needs_keys is needed


def test_a_database_without_tables_is_told_how_to_get_them(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_DATABASE_URL", database_url)
    get_settings.cache_clear()
    done = runner.invoke(app, ["keys", "create"])
    assert done.exit_code == 1
    assert "hint:  run `headrace db upgrade`" in done.stderr
    assert "Database(" not in done.stderr
