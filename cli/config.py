"""`headrace config`: the settings in force, and where each comes from."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.table import Table

from cli.output import out, print_json


def show(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Print the settings in force, with passwords masked.

    The variable beside each value is the one that sets it; headrace.yaml takes the same names in lower case, nested.
    """
    from settings import get_settings

    settings = get_settings()
    values = settings.model_dump(mode="json")
    if as_json:
        print_json(values | {"broker_url": _masked(settings.broker_url), "ledger_url": _masked(settings.ledger_url)})
        return
    table = Table("Variable", "Value", "From", box=None, header_style="bold", pad_edge=False)
    for name, value in flat(values):
        variable = "HEADRACE_" + name.upper().replace(".", "__")
        given = variable if variable in os.environ else ""
        table.add_row(variable, _shown(value), "environment" if given else _source(settings, name))
    table.add_section()
    table.add_row("broker in force", _masked(settings.broker_url), "")
    table.add_row("ledger in force", _masked(settings.ledger_url), "")
    out.print(table)


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as (dotted name, value)."""
    rows: list[tuple[str, Any]] = []
    for name, value in values.items():
        rows += flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return rows


def _source(settings: Any, name: str) -> str:
    for part in name.split("."):
        if part not in settings.model_fields_set:
            return "default"
        settings = getattr(settings, part)
    return "headrace.yaml"


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _masked(url: str) -> str:
    from cli.services import masked

    return masked(url)
