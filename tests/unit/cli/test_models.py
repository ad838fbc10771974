"""Models are announced as a worker would announce them, and checked before they are trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.checks.finding import Level
from cli.checks.model import check_model
from cli.main import app
from engine.model.catalog import CATALOG, CatalogEntry
from engine.model.digest import revision_of
from ledger import Ledger, migrate
from settings import Settings, get_settings

runner = CliRunner()
NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    get_settings.cache_clear()


@pytest.fixture
def ledger(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setenv("HEADRACE_DATABASE_URL", database_url)
    migrate.upgrade(database_url)
    return Ledger(database_url)


def test_a_registered_model_is_in_the_ledger(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MODEL__MAX_SEQ_LEN", "100")
    done = runner.invoke(app, ["models", "register", "fake", "--json"])
    assert done.exit_code == 0, done.output
    card = ledger.models()["fake"]
    assert json.loads(done.output) == card.model_dump(mode="json")
    assert (card.max_seq_len, card.chat) == (100, True)
    assert ledger.text_bundle("fake")
    listed = json.loads(runner.invoke(app, ["models", "list", "--json"]).output)
    assert [item["id"] for item in listed["announced"]] == ["fake"]
    assert listed["catalogue"] == [
        {"name": NAME, "path": None, "size_bytes": CATALOG[NAME].size_bytes, "packed_bytes": 0}
    ]
    ledger.close()


def test_listing_needs_no_ledger() -> None:
    listed = runner.invoke(app, ["models", "list"])
    assert listed.exit_code == 0, listed.output
    assert "not fetched, 98 MB" in listed.output


def test_an_unknown_model_is_told_without_a_traceback() -> None:
    for arguments in (["models", "pull", "/nowhere/x.gguf"], ["models", "pull", "nonsense"]):
        done = runner.invoke(app, arguments)
        assert done.exit_code == 1
        assert arguments[2] in done.stderr


def check(name: str, cache: Path) -> Level:
    (finding,) = check_model(Settings(cache=cache, model={"model_path": name}))  # type: ignore[arg-type]
    return finding.level


def test_the_doctor_tells_which_adapter_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    adapters = {"sql": tmp_path / "sql", "law": tmp_path / "law"}
    settings = Settings.model_validate({"cache": tmp_path, "model": {"model_path": "fake", "adapters": adapters}})
    _, sql, law = check_model(settings)
    assert sql.level is Level.OK
    assert law.level is Level.FAIL
    assert "adapter law can't be served" in law.message
    assert "holds no adapter_config.json" in law.message


def test_the_check_of_each_kind_of_name(tmp_path: Path) -> None:
    assert check("fake:step_s=0.1", tmp_path) is Level.OK
    assert check(NAME, tmp_path) is Level.WARN
    assert check(str(tmp_path), tmp_path) is Level.OK
    assert check("organisation/model", tmp_path) is Level.WARN
    assert check("/nowhere/x.gguf", tmp_path) is Level.FAIL


def test_a_changed_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "models" / NAME / CATALOG[NAME].filename
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(CATALOG[NAME].size_bytes)
    assert check(NAME, tmp_path) is Level.FAIL


def test_the_disk_space_of_packed_weights_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    monkeypatch.setattr("engine.model.catalog.list_models", lambda cache: [CatalogEntry(NAME, model, 4)])
    packed = tmp_path / "cache/packed"
    packed.mkdir(parents=True)
    revision = revision_of([model], tmp_path / "cache")
    for name, size in ((f"{revision}-a.packed", 3_000_000), (f"{revision}-b.packed", 2_000_000), ("other.packed", 7)):
        (packed / name).write_bytes(bytes(size))
    listed = runner.invoke(app, ["models", "list"])
    assert "5 MB packed" in listed.output
    listed = json.loads(runner.invoke(app, ["models", "list", "--json"]).output)
    assert listed["catalogue"][0]["packed_bytes"] == 5_000_000


class TestCheck:
    def test_every_form_is_measured_against_float32(self) -> None:
        checked = runner.invoke(app, ["models", "check", "fake", "--quantization", "int8", "--json"])
        assert checked.exit_code == 0, checked.output
        rows = json.loads(checked.stdout)
        assert [row["weights"] for row in rows] == ["float32", "bfloat16", "int8"]
        assert all(row["agreement"] == 1 and row["tokens"] > 2000 for row in rows)

    def test_a_model_that_cant_be_loaded_is_told_in_a_line(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        checked = runner.invoke(app, ["models", "check", str(tmp_path)])
        assert checked.exit_code == 1
        assert f"{tmp_path} can't be measured" in checked.stderr
        assert "Traceback" not in checked.output
