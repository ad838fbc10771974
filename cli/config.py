"""`headrace config`: the settings in force, and where each comes from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from cli.output import err, out, print_json

FALLBACKS = {"redis_url": ("REDIS_URL", "CELERY_BROKER_URL"), "database_url": ("DATABASE_URL",)}
"""The variables that fill a URL which nothing else gives, in their order."""
OTHER_VARIABLES = {"HEADRACE_API_URL", "HEADRACE_API_KEY", "HEADRACE_CPU_ISA"}
"""Those that are read, and are no settings of a process."""


def show(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Print the settings in force, with passwords masked.

    The variable beside each value is the one that sets it; headrace.yaml takes the same names in lower case, nested.
    """
    from settings import get_settings

    settings = get_settings()
    values = settings.model_dump(mode="json")
    in_force = {"redis_url": _in_force(settings, "broker_url"), "database_url": _in_force(settings, "ledger_url")}
    if as_json:
        print_json(values | {"broker_url": in_force["redis_url"], "ledger_url": in_force["database_url"]})
        return
    rows = [
        (_variable(name), in_force.get(name) or _shown(value), _source(settings, name)) for name, value in flat(values)
    ]
    _print(rows)
    for stray in strays():
        err.print(f"{stray.message}: {stray.advice}", style="yellow", soft_wrap=True, markup=False)


def _print(rows: list[tuple[str, str, str]]) -> None:
    """A table as wide as the terminal; for a program or a file, one line for each setting."""
    if not out.is_terminal:
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for variable, value, source in rows:
            print(f"{variable:<{widths[0]}}  {value:<{widths[1]}}  {source}")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("Variable", "Value", "From"):
        table.add_column(column, overflow="fold")
    for variable, value, source in rows:
        table.add_row(variable, escape(value), source)
    out.print(table)


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as (dotted name, value)."""
    rows: list[tuple[str, Any]] = []
    for name, value in values.items():
        rows += flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return rows


def _variable(name: str) -> str:
    return "HEADRACE_" + name.upper().replace(".", "__")


@dataclass(frozen=True, slots=True)
class Stray:
    """A variable that looks like a setting and is none, and what may have been meant."""

    message: str
    advice: str


def strays() -> Iterator[Stray]:
    """The environment's HEADRACE_ variables that nothing reads."""
    known = {_variable(name) for name in setting_names()} | OTHER_VARIABLES
    sections = tuple(_variable(name) for name in setting_names(sections=True))
    for name in sorted(os.environ):
        upper = name.upper()
        if not upper.startswith("HEADRACE_") or upper in known or upper.startswith(sections):
            continue
        near = [other for other in known if other.replace("__", "_") == upper] or get_close_matches(upper, known, 1)
        advice = f"did you mean {near[0]}?" if near else "`headrace config` prints those that are"
        yield Stray(f"{name} is no setting and is ignored", advice)


def nearest_setting(name: str) -> str | None:
    """The setting that a dotted name may have been meant for."""
    known = setting_names()
    near = [other for other in known if other.rpartition(".")[2] == name] or get_close_matches(name, known, 1)
    return near[0] if near else None


def setting_names(*, sections: bool = False) -> list[str]:
    """The dotted names of all settings, or of the sections, whose own names are then checked by pydantic."""
    from pydantic import BaseModel

    from settings import Settings

    def walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, bool]]:
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield prefix + name, True
                yield from walk(field.annotation, f"{prefix}{name}.")
            else:
                yield prefix + name, False

    found = walk(Settings, "")
    return [name + "." if is_section else name for name, is_section in found if is_section or not sections]


def _source(settings: Any, name: str) -> str:
    if _variable(name) in os.environ:
        return "environment"
    if getattr(settings, name, None) is None:
        for fallback in FALLBACKS.get(name, ()):
            if os.environ.get(fallback):
                return fallback
    for part in name.split("."):
        if part not in settings.model_fields_set:
            return "default"
        settings = getattr(settings, part)
    return "headrace.yaml"


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _in_force(settings: Any, name: str) -> str:
    """A URL as it is used, without its password; or why it can't be used."""
    from headrace.urls import BadUrl, masked

    try:
        return masked(getattr(settings, name))
    except BadUrl as error:
        return f"unusable: {error}"
