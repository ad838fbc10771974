"""How the command speaks: to people on a terminal, to programs in JSON, and through its exit code."""

from __future__ import annotations

import json
import os
import re
from enum import IntEnum
from itertools import takewhile
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILED = 1
    """The job did not succeed, a check failed, or the command could not do its work."""
    USAGE = 2
    INTERRUPTED = 130


class Failure(Exception):
    """An expected failure: what happened, and what to do about it. Shown without a traceback."""

    def __init__(self, message: str, hint: str | None = None, code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code


def print_json(value: Any) -> None:
    """One JSON document on standard output, for programs."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_failure(failure: Failure) -> None:
    err.print(f"[bold red]error:[/] {escape(failure.message)}", soft_wrap=True)
    if failure.hint:
        err.print(f"[dim]hint:[/]  {escape(failure.hint)}", soft_wrap=True)


class Group(TyperGroup):
    """Turns expected failures anywhere below it into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Failure as failure:
            print_failure(failure)
            raise typer.Exit(failure.code) from None
        except KeyboardInterrupt:
            err.print("stopped")
            raise typer.Exit(Exit.INTERRUPTED) from None
        except Exception as error:
            failure_ = _known(error)
            if failure_ is None:
                raise
            print_failure(failure_)
            raise typer.Exit(failure_.code) from None


def _known(error: Exception) -> Failure | None:
    """What an exception of a library means to the user, if it is one that happens in normal life."""
    for kind in type(error).__mro__:
        match f"{kind.__module__}.{kind.__name__}":
            case "pydantic_core._pydantic_core.ValidationError":
                return _settings_failure(error)
            case "pydantic_settings.exceptions.SettingsError":
                return _json_failure(error)
            case "yaml.error.MarkedYAMLError":
                return _file_failure(error)
            case "yaml.error.YAMLError":
                return Failure(f"headrace.yaml: {first_line(error)}", code=Exit.USAGE)
            case "headrace.urls.BadUrl":
                return Failure(
                    f"the settings: {error}", "correct HEADRACE_REDIS_URL or HEADRACE_DATABASE_URL", Exit.USAGE
                )
            case "ledger.contract.LedgerMissing":
                return Failure(f"the database can't be used: {first_line(error)}", "run `headrace db upgrade`")
            case "ledger.migrate.UnknownRevision":
                return Failure(
                    str(error), "name one of migrations/versions, a step as -1, `head` or `base`", Exit.USAGE
                )
            case "ledger.contract.LedgerUnavailable" | "sqlalchemy.exc.DBAPIError":
                return Failure(
                    f"the database can't be used: {first_line(error)}",
                    "check HEADRACE_DATABASE_URL (or DATABASE_URL); `headrace doctor` tells more",
                )
            case "redis.exceptions.ConnectionError" | "kombu.exceptions.OperationalError":
                return Failure(
                    f"the broker can't be reached: {first_line(error)}",
                    "check HEADRACE_REDIS_URL (or REDIS_URL); `headrace doctor` tells more",
                )
    return None


def _json_failure(error: Exception) -> Failure:
    """A variable that should hold JSON and holds something else: named by what it holds."""
    held = getattr(error.__cause__, "doc", None)
    names = [name for name, value in os.environ.items() if name.upper().startswith("HEADRACE_") and value == held]
    if not names:
        return Failure(f"the settings: {first_line(error)}", "nested settings are JSON", Exit.USAGE)
    return Failure(f"{' and '.join(names)}: no JSON: {error.__cause__}", 'such as {"name": "value"}', Exit.USAGE)


def _settings_failure(error: Any) -> Failure:
    title = str(error.title)
    lines = [f"{_setting(item['loc']) or title}: {_fault(item)}" for item in error.errors()]
    if not title.endswith("Settings"):
        return Failure(f"{title}: " + "; ".join(lines), code=Exit.USAGE)
    variables = {_variable(item["loc"]) for item in error.errors()}
    hint = f"it comes from the command line, {' or '.join(sorted(variables))}, or headrace.yaml"
    return Failure("the settings: " + "; ".join(lines), hint, Exit.USAGE)


def _setting(place: tuple[int | str, ...]) -> str:
    """A setting's name; a name in a table that can't be one is quoted."""
    if place[-1:] == ("[key]",):
        return f"{'.'.join(map(str, place[:-2]))}: the name {str(place[-2])!r}"
    return ".".join(map(str, place))


def _variable(place: tuple[int | str, ...]) -> str:
    """The variable that a setting can come from: that of the table for a name that no variable can have."""
    if place[-1:] == ("[key]",):
        place = place[:-2]
    parts = takewhile(lambda part: re.fullmatch(r"\w+", str(part), re.ASCII), place)
    return "HEADRACE_" + "__".join(map(str, parts)).upper()


def _fault(item: Any) -> str:
    """What is wrong with a setting; pydantic's words tell of classes that a user doesn't know."""
    from cli.config import nearest_setting

    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        near = nearest_setting(name)
        return "no such setting" + (f"; did you mean {near}?" if near else "")
    if item["type"] == "model_type":
        meant = "{model_path: ...}" if name == "model" else "{...}"
        return f"this is a section; you may mean `{name}: {meant}`"
    return str(item["msg"])


def _file_failure(error: Any) -> Failure:
    """A settings file that is no YAML: where, and what is wrong there."""
    mark = error.problem_mark or error.context_mark
    where = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}" if mark else "headrace.yaml"
    return Failure(
        f"{where}: {error.problem}", "it holds the settings' names in lower case, nested, as YAML", Exit.USAGE
    )


def first_line(error: object) -> str:
    """The first line of an error's message; some libraries append pages to it."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
