"""`headrace db`: the ledger's schema."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cli.output import out, print_json

app = typer.Typer(help="Create, migrate and inspect the ledger's database.", no_args_is_help=True)

_BATCH = 1000
"""Jobs removed in one transaction."""


@app.command()
def upgrade(revision: Annotated[str, typer.Argument(help="Where to go.")] = "head") -> None:
    """Bring the database to the revision that this version needs. Safe to run again and while workers run."""
    from ledger import migrate

    url = _url()
    migrate.upgrade(url, revision)
    _print_current(url)


@app.command(context_settings={"ignore_unknown_options": True})  # -1 is a revision
def downgrade(
    revision: Annotated[str, typer.Argument(help="Where to go: a revision, -1, or base.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Take the database back to an older revision. Columns and tables that it lacks are dropped with their data."""
    from ledger import migrate

    url = _url()
    migrate.check(revision)
    if not yes:
        typer.confirm(f"Go back to {revision}? What newer revisions have added is lost.", abort=True)
    migrate.downgrade(url, revision)
    _print_current(url)


@app.command()
def current(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Print the database's revision and the one that this version needs."""
    from ledger import migrate

    present, needed = migrate.current(_url()), migrate.head()
    if as_json:
        print_json({"current": present, "needed": needed, "up_to_date": present == needed})
        return
    out.print(f"{present or 'empty'}" + (" (up to date)" if present == needed else f", this version needs {needed}"))


@app.command()
def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how much there is to remove.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Remove what ended longer ago than the retention settings say, in batches. Running services do so by themselves.

    What waits or runs is never removed.
    """
    from headrace.counting import counted

    from ledger import Ledger
    from ledger.contract import Pruned
    from ledger.retention import kept
    from settings import get_settings

    retention = kept(get_settings().retention)
    ledger = Ledger(_url())
    try:
        total = dict.fromkeys(asdict(Pruned()), 0)
        while True:
            found = asdict(ledger.expired(retention) if dry_run else ledger.prune(retention, _BATCH))
            total = {kind: total[kind] + count for kind, count in found.items()}
            if dry_run or max(found["jobs"], found["dead_letters"], found["revocations"]) < _BATCH:
                break
    finally:
        ledger.close()
    if as_json:
        print_json({"dry_run": dry_run, **total})
        return
    told = ", ".join(counted(count, kind.removesuffix("s").replace("_", " ")) for kind, count in total.items())
    out.print(f"{'would remove' if dry_run else 'removed'} {told}")


def _url() -> str:
    from cli.instance import instance_settings, ledger_url

    return ledger_url(instance_settings())


def _print_current(url: str) -> None:
    from ledger import migrate

    out.print(f"the ledger is at revision {migrate.current(url) or 'base (empty)'}")
