"""The tree of commands: quick, documented, and without tracebacks for what happens in normal life."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from rich.console import Console
from typer.testing import CliRunner

from cli.instance import Instance, sole
from cli.main import app
from cli.output import Exit
from settings import Settings, get_settings
from worker.services import engine_config

runner = CliRunner()


@pytest.fixture(autouse=True)
def _fresh_settings(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    get_settings.cache_clear()


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, sub in getattr(command, "commands", {}).items():
        yield from commands(sub, (*path, name))


TREE = dict(commands(typer.main.get_command(app)))


def test_the_tree_holds_what_the_documentation_names() -> None:
    names = {" ".join(path) for path in TREE}
    assert names >= {
        "up", "demo", "submit", "status", "watch", "cancel", "retry", "jobs", "api", "worker", "flower", "doctor",
        "config", "db upgrade", "db downgrade", "db current", "models pull", "models list", "models register",
    }  # fmt: skip


@pytest.mark.parametrize("path", TREE, ids=" ".join)
def test_every_command_and_option_has_help(path: tuple[str, ...]) -> None:
    command = TREE[path]
    assert command.help
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{' '.join(path)}: {parameter.name}"
    result = runner.invoke(app, [*path, "--help"])
    assert result.exit_code == 0


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'celery', 'transformers', 'sqlalchemy', 'pydantic', 'httpx', 'redis'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["cli.up", "cli.bringup", "cli.demo", "cli.services", "cli.doctor"])
def test_the_supervisor_carries_no_torch(name: str) -> None:
    program = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_help_of_submit_shows_its_defaults() -> None:
    shown = runner.invoke(app, ["submit", "--help"], env={"COLUMNS": "200"}).output
    for default in ("256", "0.2", "1.0", "normal"):
        assert f"[default: {default}]" in shown


def test_a_worker_takes_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    extras: list[tuple[str, ...]] = []
    monkeypatch.setattr("worker.main.run_worker", lambda settings, extra: extras.append(extra))
    assert runner.invoke(app, ["worker", "--model", "fake"]).exit_code == 0
    assert runner.invoke(app, ["worker", "--model", "fake", "--name", "left"]).exit_code == 0
    assert extras == [(), ("-n", "left@%h")]


def test_a_worker_takes_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Settings] = []
    monkeypatch.setattr("worker.main.run_worker", lambda settings, extra: found.append(settings))
    arguments = ["worker", "--model", "fake", "--adapter", "sql=/models/sql", "--adapter", "law=law"]
    assert runner.invoke(app, arguments).exit_code == 0
    assert found[0].model.adapters == {"sql": Path("/models/sql"), "law": Path("law")}
    assert runner.invoke(app, ["worker", "--adapter", "sql"]).exit_code == 2


def test_a_worker_takes_the_form_of_its_weights_and_whose_kernels_multiply_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "worker.main.run_worker",
        lambda given, _: found.append((engine_config(given).quantization, engine_config(given).kernels)),
    )
    for options in ([], ["--quantization", "int4", "--kernels", "torch"], ["--kernels", "triton"]):
        assert runner.invoke(app, ["worker", "--model", "fake", *options]).exit_code == 0
    assert found == [("none", "auto"), ("int4", "torch"), ("none", "triton")]
    assert runner.invoke(app, ["worker", "--quantization", "int3"]).exit_code == 2
    assert runner.invoke(app, ["worker", "--kernels", "cuda"]).exit_code == 2


def test_a_worker_takes_the_settings_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[bool | str, bool]] = []
    monkeypatch.setattr(
        "worker.main.run_worker", lambda given, _: found.append((given.model.overlap, given.model.enforce_eager))
    )
    for options in ([], ["--overlap"], ["--no-overlap", "--enforce-eager"]):
        assert runner.invoke(app, ["worker", "--model", "fake", *options]).exit_code == 0
    assert found == [("auto", False), (True, False), (False, True)]


def test_a_demo_that_cannot_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = runner.invoke(app, ["demo", "--model", "nope"])
    assert result.exit_code == Exit.FAILED
    assert "nope" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_server_is_told_in_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(sys, "argv", ["headrace"])
    result = runner.invoke(app, ["submit", "hello"])
    assert result.exit_code == Exit.FAILED
    assert "no Headrace API answers at http://127.0.0.1:9" in result.stderr
    assert "headrace up" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit"],
        ["submit", ""],
        ["submit", "", "--raw"],
        ["submit", "a", "--file", "-"],
        ["submit", "a", "--stream", "--json"],
        ["submit", "a", "--raw", "--system", "b"],
        ["submit", "a", "--top-p", "2"],
        ["submit", "a", "--n", "17"],
        ["submit", "a", "--n", "2", "--stream"],
        ["submit", "a", "--param", "logprobs"],
        ["submit", "a", "--priority", "urgent"],
        ["status"],
        ["status", ""],
        ["watch", ""],
        ["cancel", "a", "\udcff"],
        ["retry", ""],
        ["submit", "--file", sys.executable],
        ["nonsense"],
    ],
)
def test_wrong_usage_is_two(arguments: list[str]) -> None:
    assert runner.invoke(app, arguments, input="text").exit_code == Exit.USAGE


def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API__PORT", "99999")
    result = runner.invoke(app, ["config"])
    assert result.exit_code == Exit.USAGE
    assert "api.port" in result.stderr


def test_config_masks_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", "redis://user:secret@broker:6379/0")
    monkeypatch.setenv("DATABASE_URL", "postgresql://user:secret@database/headrace")
    for arguments in (["config"], ["config", "--json"]):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 0
        assert "secret" not in result.output
        assert "broker:6379" in result.output
    shown = json.loads(runner.invoke(app, ["config", "--json"]).output)
    assert shown["api"]["port"] == 8000


@pytest.mark.parametrize("arguments", [["config"], ["config", "--json"], ["doctor"], ["db", "current"], ["api"]])
@pytest.mark.parametrize(
    ("broker", "database"),
    [
        ("redis://broker:9/0?password=secret", "postgresql://127.0.0.1:9/name?user=u&password=secret"),
        ("redis://:secret/x@broker:9/0", "postgresql://u:secret/x@127.0.0.1:9/name"),
        ("redis://:secret#x@broker:9/0", "postgresql://u:x@secret@127.0.0.1:9/name"),
        ("amqp://u:secret@broker:9//", "postgresql://u:secret@127.0.0.1:9/name?nosuchoption=1"),
        ("sentinel://:secret@broker:9", "sqlite:////tmp/x?password=secret"),
    ],
)
def test_no_command_shows_a_password(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], broker: str, database: str
) -> None:
    monkeypatch.setattr("ledger.database.RETRY_FOR_S", 0.1)
    monkeypatch.setenv("HEADRACE_REDIS_URL", broker)
    monkeypatch.setenv("HEADRACE_DATABASE_URL", database)
    if arguments == ["api"]:
        monkeypatch.setattr("api.main.run_api", lambda settings: None)
    result = runner.invoke(app, arguments)
    assert "secret" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_config_says_where_a_value_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    Path(str(tmp_path), "headrace.yaml").write_text("api:\n  max_wait_s: 5\n")
    monkeypatch.setenv("HEADRACE_API__PORT", "8100")
    lines = runner.invoke(app, ["config"]).output.splitlines()
    found = {line.split()[0]: line.split()[-1] for line in lines if line.startswith("HEADRACE_API__")}
    assert found["HEADRACE_API__PORT"] == "environment"
    assert found["HEADRACE_API__MAX_WAIT_S"] == "headrace.yaml"
    assert found["HEADRACE_API__HOST"] == "default"


def test_config_shows_a_url_that_a_common_variable_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_REDIS_URL", raising=False)
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://user:secret@broker:6379/0")
    monkeypatch.setenv("COLUMNS", "80")
    lines = runner.invoke(app, ["config"]).output.splitlines()
    found = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("HEADRACE_")}
    assert found["HEADRACE_REDIS_URL"][0].startswith("redis://user:***@")
    assert found["HEADRACE_REDIS_URL"][-1] == "CELERY_BROKER_URL"


def test_config_cuts_nothing_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.config.out", Console(width=80))
    monkeypatch.setenv("HEADRACE_DATABASE_URL", "postgresql://database.example.org/" + "x" * 80)
    shown = runner.invoke(app, ["config"]).output
    assert shown.count("x") > 80
    assert "…" not in shown


@pytest.mark.parametrize("arguments", [["doctor"], ["db", "upgrade"], ["up", "--broker-port", "0"]], ids=" ".join)
def test_another_database_is_told_in_words(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HEADRACE_DATABASE_URL", "mysql://database/headrace")
    result = runner.invoke(app, arguments)
    assert result.exit_code in (Exit.FAILED, Exit.USAGE)
    assert isinstance(result.exception, SystemExit)
    told = " ".join(result.output.split())
    assert "SQLite and PostgreSQL are supported" in told
    assert "mysql://" in told


def test_a_broken_settings_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "headrace.yaml").write_text("api:\n  port: [80\nmodel: x\n")
    result = runner.invoke(app, ["config"])
    assert result.exit_code == Exit.USAGE
    assert "headrace.yaml" in result.stderr
    assert "line 3" in result.stderr


def test_a_settings_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "headrace.yaml").write_bytes(b"api: \x01")
    result = runner.invoke(app, ["config"])
    assert result.exit_code == Exit.USAGE
    assert "headrace.yaml: unacceptable character" in result.stderr


@pytest.mark.parametrize("text", [b"- a list", b"text", b"17", b"1: 2", b"api: \xff"])
def test_a_settings_file_that_holds_no_settings_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "headrace.yaml").write_bytes(text)
    result = runner.invoke(app, ["config"])
    assert result.exit_code == Exit.USAGE
    assert "headrace.yaml: it " in result.stderr


@pytest.mark.parametrize(("name", "value"), [("HEADRACE_API", "{"), ("HEADRACE_MODEL__ADAPTERS", "notjson")])
def test_a_setting_that_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    result = runner.invoke(app, ["config"])
    assert result.exit_code == Exit.USAGE
    assert f"error: {name}: no JSON: Expecting" in result.stderr


@pytest.mark.parametrize("name", ["", "a b"])
def test_a_table_s_name_that_can_t_be_one_is_told_with_the_table_s_variable(tmp_path: Path, name: str) -> None:
    (tmp_path / "headrace.yaml").write_text(f'model: {{adapters: {{"{name}": /x}}}}')
    result = runner.invoke(app, ["config"])
    told = " ".join(result.stderr.split())
    assert result.exit_code == Exit.USAGE
    assert f"model.adapters: the name '{name}': String should match" in told
    assert "HEADRACE_MODEL__ADAPTERS, or" in told


@pytest.mark.parametrize("service", ["api", "flower"])
def test_a_taken_port_is_told_in_words(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", "redis://127.0.0.1:9/0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = runner.invoke(app, [service, "--port", str(port)])
    assert result.exit_code == Exit.FAILED
    assert f"port {port} of 127.0.0.1: Address already in use" in result.stderr
    assert "--port" in result.stderr


def test_flower_beyond_the_loopback_needs_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWER_BASIC_AUTH", raising=False)
    result = runner.invoke(app, ["flower", "--address", "0.0.0.0"])
    assert result.exit_code == Exit.FAILED
    assert "password" in result.stderr


def test_flower_without_a_broker_says_so() -> None:
    result = runner.invoke(app, ["flower"])
    assert result.exit_code == Exit.FAILED
    assert "HEADRACE_REDIS_URL" in result.stderr


def test_a_variable_that_is_no_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_PORT", "9000")
    monkeypatch.setenv("HEADRACE_API_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HEADRACE_MODEL__TENANT_WEIGHTS__SHOP", "2")
    told = runner.invoke(app, ["config"]).stderr
    assert told == "HEADRACE_API_PORT is no setting and is ignored: did you mean HEADRACE_API__PORT?\n"


def test_a_settings_file_with_wrong_names_is_told_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "headrace.yaml").write_text("model: smollm2-135m\napi:\n  prot: 3\nport: 3\nzzz: 1\n")
    result = runner.invoke(app, ["config"])
    assert result.exit_code == Exit.USAGE
    assert "model: this is a section; you may mean `model: {model_path: ...}`" in result.stderr
    assert "api.prot: no such setting; did you mean api.port?" in result.stderr
    assert "; port: no such setting; did you mean api.port?" in result.stderr
    assert "zzz: no such setting" in result.stderr


def test_a_device_that_nothing_serves_is_a_wrong_setting() -> None:
    result = runner.invoke(app, ["worker", "--model", "fake", "--device", "tpu"])
    assert result.exit_code == Exit.USAGE
    assert "model.device" in result.stderr
    assert "name auto, cpu, cuda or cuda:N" in result.stderr


def test_config_for_a_program_has_one_line_for_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DATABASE_URL", "postgresql://database.example.org/" + "x" * 80)
    lines = runner.invoke(app, ["config"]).stdout.splitlines()
    assert all(line.startswith("HEADRACE_") for line in lines)
    assert any(line.split()[:2] == ["HEADRACE_MODEL__TENSOR_PARALLEL_SIZE", "1"] for line in lines)


def test_a_worker_of_a_model_that_is_not_there_says_that_alone() -> None:
    for named in (["nonsense"], ["/nowhere/x.gguf"], ["fake", "--speculative-model", "nonsense"]):
        result = runner.invoke(app, ["worker", "--model", *named])
        assert result.exit_code == Exit.FAILED
        first, second = result.stderr.splitlines()
        assert first.startswith(f"error: No model '{named[-1]}'")
        assert second.startswith("hint:")


def test_a_worker_says_where_it_works_and_that_an_instance_is_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setenv("HEADRACE_REDIS_URL", "redis://:secret@broker:6379/0")
    monkeypatch.setattr("worker.main.run_worker", lambda settings, extra: None)
    own = f"broker redis://:***@broker:6379/0, ledger sqlite:///{tmp_path}/headrace.sqlite3"
    told = runner.invoke(app, ["worker", "--model", "fake"]).stderr
    assert told == f"worker of fake: {own}\n"
    with sole(tmp_path):
        up = Instance("http://127.0.0.1:1", None, "redis://127.0.0.1:7/0", "sqlite:////x.sqlite3", "fake", 1)
        up.write(tmp_path)
        told = runner.invoke(app, ["worker", "--model", "fake"]).stderr
        assert told.startswith(f"worker of fake: {own}\n")
        assert "is elsewhere: broker redis://127.0.0.1:7/0, ledger sqlite:////x.sqlite3;" in told
        monkeypatch.setenv("HEADRACE_REDIS_URL", up.broker_url)
        monkeypatch.setenv("HEADRACE_DATABASE_URL", up.database_url)
        get_settings.cache_clear()
        assert "elsewhere" not in runner.invoke(app, ["worker", "--model", "fake"]).stderr


def test_ctrl_c_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        asking = subprocess.Popen(
            [sys.executable, "-m", "cli", "jobs", "--url", url],
            cwd=Path(__file__).parents[3],
            stderr=subprocess.PIPE,
            text=True,
        )
        with silent.accept()[0] as connection:
            connection.recv(1)
            asking.send_signal(signal.SIGINT)
            _, told = asking.communicate(timeout=30)
    assert (asking.returncode, told) == (Exit.INTERRUPTED, "stopped\n")
