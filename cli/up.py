"""`headrace up`: everything that an instance needs, in one terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from cli.invocation import command
from cli.models import QUANTIZATION, Quantization
from cli.output import Exit, out
from cli.params import Adapters, named_paths


def up(
    home: Annotated[
        Path | None, typer.Option(help="Where the instance keeps its data; by default HEADRACE_HOME.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A catalogue name, a Hugging Face directory, a GGUF file, or `fake`; by default smollm2-135m."
        ),
    ] = None,
    api_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the API, by default 8000; 0 takes a free one.")
    ] = None,
    flower_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of Flower, by default 5555; 0 takes a free one.")
    ] = None,
    broker_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the embedded broker; 0 takes a free one.")
    ] = 6379,
    flower: Annotated[bool, typer.Option(help="Run Flower, the dashboard.")] = True,
    quantization: Annotated[Quantization | None, typer.Option(help=QUANTIZATION)] = None,
    adapter: Adapters = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Keep the services' output in their logs.")] = False,
) -> None:
    """Run the whole of Headrace here: broker, API, a worker and Flower, until Ctrl-C.

    What you don't name is embedded: a Valkey server unless HEADRACE_REDIS_URL (or REDIS_URL) is set, an SQLite
    database unless HEADRACE_DATABASE_URL (or DATABASE_URL) is. A port that is taken is replaced by a free one. The
    other commands find this instance by themselves. A service that ends is started again; one that ends five times
    in a row stops everything. Ctrl-C lets running jobs finish; a second one doesn't wait. Logs are in HOME/logs.

    Exit codes: 0 stopped by you, 1 something could not run, 2 wrong usage.
    """
    from cli.bringup import Plan, Screen, Stack
    from cli.instance import sole
    from cli.signals import interrupts
    from settings import settings_with

    given = {
        "model_path": model,
        "quantization": quantization,
        "adapters": named_paths(adapter) if adapter else None,
    }
    settings = settings_with(
        home=home.absolute() if home else None,
        model={name: value for name, value in given.items() if value is not None} or None,
        api={"port": api_port} if api_port is not None else None,
        flower_port=flower_port,
    )
    screen = Screen(quiet=quiet)
    with sole(settings.home), interrupts() as interrupt:
        stack = Stack.plan(Plan(settings, broker_port, flower), screen, interrupt)
        try:
            stack.start()
            _announce(stack.urls(), settings.home / "logs")
            stack.keep()
        except KeyboardInterrupt:
            screen.report("stopped while starting")
            raise typer.Exit(Exit.INTERRUPTED) from None
        finally:
            stack.stop()
        screen.report("stopped")


def _announce(urls: dict[str, str], logs: Path) -> None:
    table = Table.grid(padding=(0, 2))
    for name, url in urls.items():
        table.add_row(f"[bold]{name}[/]", url)
    table.add_row("[bold]logs[/]", str(logs))
    out.print(table, soft_wrap=True)
    example = f'{command()} submit "Why is the sky blue?" --wait'
    out.print(f"\nTry, in another terminal:  [bold]{escape(example)}[/]\nCtrl-C stops it all.", soft_wrap=True)
