"""Commands that are one service each, in the foreground: for a service manager or a container to run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.models import QUANTIZATION, Quantization, fetch, pull_model
from cli.output import Failure, err
from cli.params import Adapters, named_paths

if TYPE_CHECKING:
    from settings import Settings


def api(
    host: Annotated[str | None, typer.Option(help="Address to listen on; by default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on; by default 8000.")] = None,
    auth: Annotated[
        Literal["auto", "keys", "none"] | None,
        typer.Option(help="Whether requests need an API key; auto: unless only this machine can reach it."),
    ] = None,
) -> None:
    """Run the HTTP API: jobs and their events, models, health and metrics; /docs describes every route.

    Where others can reach it, requests need a key (`headrace keys create`), and without any key it doesn't start.
    """
    from api.main import run_api
    from cli.instance import require_urls
    from settings import settings_with

    given = {"host": host, "port": port, "auth": auth}
    settings = settings_with(api={name: value for name, value in given.items() if value is not None} or None)
    require_urls(settings)
    _must_be_guarded(settings)
    _must_be_bindable(settings.api.host, settings.api.port)
    run_api(settings)


def worker(
    model: Annotated[
        str | None,
        typer.Option(help="A catalogue name, a Hugging Face directory, a GGUF file, a hub id, or `fake`."),
    ] = None,
    alias: Annotated[str | None, typer.Option(help="The name that jobs use for it.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; by default the best there is.")] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, max=64, help="Devices that the model is divided among.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Most jobs in one batch; by default 64.")] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of prompt and output; by default 4096.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    quantization: Annotated[Quantization | None, typer.Option(help=QUANTIZATION)] = None,
    kernels: Annotated[
        Literal["auto", "torch", "triton"] | None,
        typer.Option(help="Whose operations a GPU computes with; by default Triton's where it runs, else torch's."),
    ] = None,
    adapter: Adapters = None,
    kv_cache_dtype: Annotated[
        Literal["auto", "int8", "fp8"] | None,
        typer.Option(help="What keys and values are kept as: auto as the weights; int8 and fp8 in half of that."),
    ] = None,
    enforce_eager: Annotated[
        bool | None, typer.Option("--enforce-eager", help="Record no steps on a GPU: slower, and less memory.")
    ] = None,
    overlap: Annotated[
        bool | None,
        typer.Option(help="Plan the next step while the device computes; by default on a GPU."),
    ] = None,
    kv_compression_ratio: Annotated[
        float | None,
        typer.Option(help="Share of a long request's keys and values that is kept, over 0 to 1; 1 keeps all."),
    ] = None,
    speculative_model: Annotated[
        str | None, typer.Option(help="A smaller model of the same vocabulary that guesses tokens ahead.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The worker's own name, before the @ and the host; one of its own for each.")
    ] = None,
) -> None:
    """Run a worker: one resident model that takes jobs from its queue and batches them.

    SIGTERM lets running jobs finish (HEADRACE_WORKER__DRAIN_S) and hands the rest back. Celery's own command works
    too: celery -A worker.app worker
    """
    from cli.instance import require_urls
    from settings import settings_with

    given = {
        "model_path": model,
        "alias": alias,
        "device": device,
        "tensor_parallel_size": tensor_parallel_size,
        "max_num_seqs": max_num_seqs,
        "max_seq_len": max_seq_len,
        "threads": threads,
        "quantization": quantization,
        "kernels": kernels,
        "speculative_model": speculative_model,
        "adapters": named_paths(adapter) if adapter else None,
        "kv_cache_dtype": kv_cache_dtype,
        "enforce_eager": enforce_eager,
        "overlap": overlap,
        "kv_compression": None if kv_compression_ratio is None else {"ratio": kv_compression_ratio},
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    settings = settings_with(model=chosen or None)
    require_urls(settings)
    pull_model(settings)
    if settings.model.speculative_model is not None:
        fetch(settings.model.speculative_model, settings.cache, "--speculative-model")
    _say_where(settings)
    from worker.main import run_worker

    run_worker(settings, ("-n", f"{name}@%h") if name else ())


def _say_where(settings: Settings) -> None:
    """Print the broker and the ledger of a worker, and those of a `headrace up` in its home if they are others."""
    from headrace.urls import masked

    from cli.instance import running

    def place(broker: str, ledger: str) -> str:
        return f"broker {masked(broker)}, ledger {masked(ledger)}"

    own = place(settings.broker_url, settings.ledger_url)
    err.print(f"worker of {settings.model.name}: {own}", soft_wrap=True, markup=False)
    instance = running(settings.home)
    if instance is not None and (theirs := place(instance.broker_url, instance.database_url)) != own:
        err.print(
            f"the `headrace up` in {settings.home} is elsewhere: {theirs}; "
            "HEADRACE_REDIS_URL and HEADRACE_DATABASE_URL make a worker part of it",
            style="yellow",
            soft_wrap=True,
            markup=False,
        )


def _must_be_guarded(settings: Settings) -> None:
    """Raise Failure if others could reach the door, and nobody has said who may.

    A ledger that can't be asked now is no reason not to start: no request is served without it.
    """
    if settings.api.auth != "auto" or not settings.api.needs_keys:
        return
    from contextlib import suppress

    from ledger import Ledger
    from ledger.contract import LedgerUnavailable

    ledger = Ledger(settings.ledger_url)
    try:
        with suppress(LedgerUnavailable):
            if not ledger.keys.list(usable=True):
                raise Failure(
                    f"the API on {settings.api.host} can be reached by others, and there is no API key",
                    "make one: `headrace keys create`; --auth keys starts without one, --auth none lets everybody in",
                )
    finally:
        ledger.close()


def _must_be_bindable(host: str, port: int) -> None:
    """Raise Failure if no server can listen there now."""
    from cli.ports import obstacle

    why_not = obstacle(port, host)
    if why_not:
        raise Failure(
            f"nothing can listen on port {port} of {host}: {why_not}", "stop what listens there, or name another --port"
        )


def flower(
    address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on; by default 5555.")] = None,
    basic_auth: Annotated[
        str | None, typer.Option(envvar="FLOWER_BASIC_AUTH", help="USER:PASSWORD; needed beyond the loopback.")
    ] = None,
) -> None:
    """Run Flower, Celery's dashboard, on the same broker settings as the workers. Its history is kept in HOME/flower.

    Whoever reaches Flower can stop jobs, so beyond the loopback it refuses to run without a password.
    """
    import sys

    from cli.instance import broker_given, instance_settings
    from cli.services import flower_arguments
    from settings import is_loopback

    if not is_loopback(address) and not basic_auth:
        raise Failure(
            f"Flower on {address} without a password would let anyone stop jobs",
            "give --basic-auth USER:PASSWORD, or set FLOWER_BASIC_AUTH",
        )
    settings = instance_settings()
    if not broker_given(settings):
        raise Failure(
            "no broker is named, and no `headrace up` runs here",
            "set HEADRACE_REDIS_URL (or REDIS_URL) to the broker's",
        )
    port = settings.flower_port if port is None else port
    _must_be_bindable(address, port)
    env = os.environ | {"HEADRACE_REDIS_URL": settings.broker_url}
    if is_loopback(address):
        env["FLOWER_UNAUTHENTICATED_API"] = "true"
    arguments = flower_arguments(settings, address, port)
    if basic_auth:
        env["FLOWER_BASIC_AUTH"] = basic_auth
    os.execve(sys.executable, [sys.executable, "-m", "celery", *arguments], env)  # noqa: S606
