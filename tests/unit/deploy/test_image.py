"""The image runs the command that the package installs, as an ordinary user, on the pinned versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_entrypoint_is_an_installed_command() -> None:
    entrypoint = re.search(r'^ENTRYPOINT \["(\w+)"\]', DOCKERFILE, re.MULTILINE)
    assert entrypoint is not None
    assert entrypoint[1] in PROJECT["scripts"]


def test_it_runs_as_an_ordinary_user() -> None:
    user = re.findall(r"^USER (\w+)", DOCKERFILE, re.MULTILINE)
    assert user == ["headrace"]
    assert DOCKERFILE.index("useradd") < DOCKERFILE.index("USER headrace") < DOCKERFILE.index("ENTRYPOINT")


def test_whatever_caches_does_so_in_a_volume() -> None:
    """The root is read-only: a library that wrote into the user's home would fail."""
    for variable in ("HEADRACE_HOME", "HEADRACE_CACHE", "HF_HOME", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
        path = re.search(rf"\b{variable}=(\S+)", DOCKERFILE)
        assert path is not None, variable
        assert path[1].startswith(("/var/lib/headrace", "/var/cache/headrace")), variable


def test_the_last_stage_takes_what_the_first_one_installed() -> None:
    assert DOCKERFILE.count("FROM ") == 2
    assert "pip install -c constraints.txt" in DOCKERFILE
    assert "COPY --from=build /opt/headrace /opt/headrace" in DOCKERFILE


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonical(line.split("==")[0]) for line in lines if line and not line.startswith("#")}
    assert all("==" in line for line in lines if line and not line.startswith("#"))
    optional = PROJECT["optional-dependencies"]
    for requirement in [*PROJECT["dependencies"], *optional["embedded"], *optional["dev"], *optional["audit"]]:
        name = canonical(re.split(r"[\[<>=!~ ]", requirement)[0])
        assert name in pinned or name == "headrace", name


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_server_package_holds_the_rooms_and_not_the_client() -> None:
    from setuptools import find_packages

    where = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    found = {name.partition(".")[0] for name in find_packages(str(ROOT), **where)}
    assert found == {"api", "cli", "engine", "kernels", "ledger", "migrations", "settings", "text", "worker"}
