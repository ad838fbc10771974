"""The compose files are valid, and name only commands, settings, ports and routes that the code has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml
from pydantic import BaseModel

from cli.main import app
from settings import Settings

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads(Path(__file__).with_name("compose-spec.json").read_text())
BASE, GPU = "docker-compose.yml", "docker-compose.gpu.yml"
OURS = ("migrate", "api", "worker", "flower")


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return content


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return dict(load(BASE)["services"])


@pytest.mark.parametrize("name", [BASE, GPU])
def test_fits_the_compose_specification(name: str) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(load(name))


def test_the_schema_refuses_what_compose_refuses() -> None:
    broken = load(BASE)
    broken["services"]["api"]["depend_on"] = ["redis"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(broken)


@pytest.mark.parametrize("name", [BASE, GPU])
def test_every_command_parses(name: str) -> None:
    for service, spec in load(name)["services"].items():
        if service in OURS and "command" in spec:
            parse(list(spec["command"]))


def parse(arguments: list[str]) -> None:
    """Parse a command line down to its leaf without running it. Raises what the command line would."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *arguments = arguments
        assert name in command.commands, f"no command {name}"
        command = command.commands[name]
    command.make_context(command.name, arguments)


def test_parse_refuses_an_unknown_option() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(["api", "--listen", "0.0.0.0"])


@pytest.mark.parametrize("name", [BASE, GPU])
def test_every_variable_is_a_setting(name: str) -> None:
    known = set(variables(Settings))
    for spec in load(name)["services"].values():
        for variable in spec.get("environment", {}):
            if variable.startswith("HEADRACE_"):
                assert variable in known, variable


def variables(model: type[BaseModel], prefix: str = "HEADRACE_") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        variable = prefix + name.upper()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += variables(field.annotation, variable + "__")
        else:
            found.append(variable)
    return found


def test_the_settings_accept_the_values(services: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in (services["worker"], load(GPU)["services"]["worker"]):
        for variable, value in spec["environment"].items():
            if variable.startswith("HEADRACE_"):
                monkeypatch.setenv(variable, interpolated(value))
    settings = Settings()
    assert settings.worker.drain_s < seconds(services["worker"]["stop_grace_period"])
    assert settings.broker_url == "redis://redis:6379/0"
    assert settings.ledger_url.endswith("@postgres:5432/headrace")


def interpolated(value: str) -> str:
    """A value with Compose's defaults filled in."""
    return re.sub(r"\$\{\w+(?::([-?])([^}]*))?\}", lambda m: (m[2] or "") if m[1] == "-" else "given", value)


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


def test_health_checks_ask_for_routes_that_exist(services: dict[str, Any]) -> None:
    from api.app import create_app

    def urls(service: str) -> list[tuple[int, str]]:
        text = " ".join(services[service]["healthcheck"]["test"])
        return [(int(port), path) for port, path in re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", text)]

    assert urls("api") == [(8000, "/healthz")]
    assert "/healthz" in create_app(Settings()).openapi()["paths"]
    assert urls("flower") == [(5555, "/healthcheck")]
    from flower.urls import handlers

    assert any(isinstance(route, tuple) and route[0] == "/healthcheck" for route in handlers)
    assert urls("worker") == [(Settings().worker.metrics_port, "/livez")]


def test_published_ports_are_those_that_the_commands_listen_on(services: dict[str, Any]) -> None:
    for service in ("api", "flower"):
        (published,) = services[service]["ports"]
        command = services[service]["command"]
        assert interpolated(published).split(":")[1] == command[command.index("--port") + 1]


def test_dependencies_and_volumes_exist_and_what_is_waited_for_has_a_health_check(services: dict[str, Any]) -> None:
    volumes = load(BASE)["volumes"]
    for name, spec in services.items():
        for other, how in spec.get("depends_on", {}).items():
            assert other in services, f"{name} waits for {other}"
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[other], other
        for volume in spec.get("volumes", []):
            assert volume.split(":")[0] in volumes


def test_only_the_migration_ends_by_itself(services: dict[str, Any]) -> None:
    restarts = {name: spec["restart"] for name, spec in services.items()}
    assert restarts.pop("migrate") == "no"
    assert set(restarts.values()) == {"unless-stopped"}


def test_the_broker_never_throws_a_message_away(services: dict[str, Any]) -> None:
    command = " ".join(services["redis"]["command"])
    assert "--maxmemory-policy noeviction" in command
    assert "--appendonly yes" in command


def test_flower_beyond_the_loopback_has_a_password(services: dict[str, Any]) -> None:
    assert "FLOWER_BASIC_AUTH" in services["flower"]["environment"]
    assert services["flower"]["environment"]["FLOWER_BASIC_AUTH"].startswith("${FLOWER_BASIC_AUTH:?")


def test_the_gpu_file_changes_only_services_of_the_base_file(services: dict[str, Any]) -> None:
    assert set(load(GPU)["services"]) <= set(services)


def test_our_containers_can_write_nowhere_but_where_data_belong(services: dict[str, Any]) -> None:
    for name in OURS:
        spec = services[name]
        assert spec["read_only"] is True, name
        assert spec["tmpfs"] == ["/tmp"], name
        assert spec["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in spec["security_opt"], name
        assert "privileged" not in spec
        assert "user" not in spec  # the image's own


def test_the_api_asks_for_keys(services: dict[str, Any]) -> None:
    command = services["api"]["command"]
    assert command[command.index("--auth") + 1] == "keys"
