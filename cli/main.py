"""The `headrace` command: its tree. Each command imports what it needs when it runs, so that help is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import config, db, demo, dlq, doctor, jobs, keys, models, serve, up
from cli.output import Group

app = typer.Typer(
    name="headrace",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"headrace {version('headrace-server')}")
        except PackageNotFoundError:
            print("headrace, from a working tree")
        raise typer.Exit


@app.callback()
def headrace(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """LLM inference as jobs on a message queue.

    Settings come from the command line, HEADRACE_... variables, headrace.yaml, and defaults, in this order;
    `headrace config` shows them. Exit codes: 0 done, 1 a job or the command failed, 2 wrong usage, 130 interrupted.
    """


HERE, JOBS, SERVE, CARE = "Run it here", "Jobs", "Services", "Care"

app.command(rich_help_panel=HERE)(up.up)
app.command(rich_help_panel=HERE)(demo.demo)
for job_command in (jobs.submit, jobs.status, jobs.watch, jobs.cancel, jobs.retry):
    app.command(rich_help_panel=JOBS)(job_command)
app.command("jobs", rich_help_panel=JOBS)(jobs.list_jobs)
app.add_typer(dlq.app, name="dlq", rich_help_panel=JOBS)
for service in (serve.api, serve.worker, serve.flower):
    app.command(rich_help_panel=SERVE)(service)
app.add_typer(db.app, name="db", rich_help_panel=CARE)
app.add_typer(keys.app, name="keys", rich_help_panel=CARE)
app.add_typer(models.app, name="models", rich_help_panel=CARE)
app.command(rich_help_panel=CARE)(doctor.doctor)
app.command("config", rich_help_panel=CARE)(config.show)


def main() -> None:
    app(prog_name="headrace")
