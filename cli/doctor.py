"""`headrace doctor`: is everything as it has to be?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from cli.output import Exit, out, print_json

if TYPE_CHECKING:
    from cli.checks.finding import Finding
    from settings import Settings

MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}
COLUMNS = (4, 7)
"""As wide as the longest mark and the longest area."""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Check broker, database, model and machine, and say what to do about what is wrong.

    It looks at the settings in force and, where they name nothing, at the running `headrace up`. Nothing is changed.

    Exit codes: 0 nothing failed (warnings are allowed), 1 something failed.
    """
    from cli.instance import instance_settings

    findings = []
    for finding in _findings(instance_settings()):
        findings.append(finding)
        if not as_json:
            out.print(_line(finding))
    failed = any(finding.level.value == "fail" for finding in findings)
    if as_json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    if failed:
        raise typer.Exit(Exit.FAILED)


def _findings(settings: Settings) -> Iterator[Finding]:
    """Each as soon as its check is done; what a check needs is imported when its turn comes."""
    from cli.checks.machine import check_machine

    yield from check_machine(settings)
    from cli.checks.model import check_model

    yield from check_model(settings)
    from cli.checks.broker import check_broker

    yield from check_broker(settings)
    from cli.checks.ledger import check_ledger, check_spool

    yield from check_ledger(settings)
    yield from check_spool(settings)


def _line(finding: Finding) -> Table:
    advice = f"\n[dim]→ {escape(finding.advice)}[/]" if finding.advice else ""
    line = Table.grid(padding=(0, 2))
    for width in COLUMNS:
        line.add_column(width=width)
    line.add_row(MARKS[finding.level.value], f"[bold]{finding.area}[/]", escape(finding.message) + advice)
    return line
