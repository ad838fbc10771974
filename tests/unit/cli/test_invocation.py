"""Hints name the command so that the user's shell finds it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cli.invocation import command


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "my venv" / "headrace"
    path.parent.mkdir()
    path.touch(mode=0o755)
    return path


def test_a_command_on_the_path_is_called_by_its_name(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(program), "up"])
    monkeypatch.setenv("PATH", str(program.parent))
    assert command() == "headrace"


def test_a_command_beside_the_path_is_called_as_it_was(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(program.parents[1])
    monkeypatch.setattr(sys, "argv", ["my venv/headrace", "up"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert command() == "'my venv/headrace'"


def test_another_command_of_that_name_is_not_meant(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = program.parents[1] / "headrace"
    other.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program), "up"])
    monkeypatch.setenv("PATH", str(other.parent))
    assert command() == f"'{program}'"


def test_a_command_that_is_no_file_from_here_is_called_by_its_name(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(program.parents[1])
    monkeypatch.setattr(sys, "argv", ["headrace", "up"])
    monkeypatch.setenv("PATH", str(program.parent))
    assert command() == "headrace"


def test_a_module_is_called_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/cli/__main__.py", "up"])
    assert command() == f"{sys.executable} -m cli"
