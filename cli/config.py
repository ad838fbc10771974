"""`headrace config`: the settings in force, and where each comes from."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from cli.output import out, print_json

FALLBACKS = {"redis_url": ("REDIS_URL", "CELERY_BROKER_URL"), "database_url": ("DATABASE_URL",)}
"""The variables that fill a URL which nothing else gives, in their order."""


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
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("Variable", "Value", "From"):
        table.add_column(column, overflow="fold")
    for name, value in flat(values):
        table.add_row(_variable(name), escape(in_force.get(name) or _shown(value)), _source(settings, name))
    out.print(table)


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as (dotted name, value)."""
    rows: list[tuple[str, Any]] = []
    for name, value in values.items():
        rows += flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return rows


def _variable(name: str) -> str:
    return "HEADRACE_" + name.upper().replace(".", "__")


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
