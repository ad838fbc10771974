"""`headrace doctor`: is everything as it has to be?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from cli.output import Exit, out, print_json

if TYPE_CHECKING:
    from cli.checks.finding import Finding

MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Check broker, database, model and machine, and say what to do about what is wrong.

    It looks at the settings in force and, where they name nothing, at the running `headrace up`. Nothing is changed.

    Exit codes: 0 nothing failed (warnings are allowed), 1 something failed.
    """
    from cli.checks.broker import check_broker
    from cli.checks.ledger import check_ledger, check_spool
    from cli.checks.machine import check_machine
    from cli.checks.model import check_model
    from cli.instance import instance_settings

    settings = instance_settings()
    findings = [
        *check_machine(settings),
        *check_model(settings),
        *check_broker(settings),
        *check_ledger(settings),
        *check_spool(settings),
    ]
    failed = any(finding.level.value == "fail" for finding in findings)
    if as_json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        out.print(_table(findings))
    if failed:
        raise typer.Exit(Exit.FAILED)


def _table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        advice = f"\n[dim]→ {escape(finding.advice)}[/]" if finding.advice else ""
        table.add_row(MARKS[finding.level.value], f"[bold]{finding.area}[/]", escape(finding.message) + advice)
    return table
