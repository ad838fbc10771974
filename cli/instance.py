"""The running instance of a home: one `headrace up` at a time, found by every other command through `up.json`."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cli.output import Exit, Failure

if TYPE_CHECKING:
    from settings import Settings

DEFAULT_API_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Instance:
    """What `headrace up` runs: addresses, and process ids by service."""

    api_url: str
    flower_url: str | None
    broker_url: str
    database_url: str
    model: str
    pid: int
    pids: dict[str, int] = field(default_factory=dict)

    def write(self, home: Path) -> None:
        """Replace the home's `up.json` in one step. Only its owner may read it: URLs can hold passwords."""
        new = _state_file(home).with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(json.dumps(asdict(self), indent=2) + "\n")
        new.replace(_state_file(home))


def _state_file(home: Path) -> Path:
    return home / "up.json"


@contextmanager
def sole(home: Path) -> Iterator[None]:
    """Be the one `headrace up` of a home. The lock ends with the process, however it ends."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "up.lock").open("a") as lock:
        _take(lock, home)
        _state_file(home).unlink(missing_ok=True)
        try:
            yield
        finally:
            _state_file(home).unlink(missing_ok=True)


def _take(lock: TextIO, home: Path) -> None:
    """Lock exclusively; other commands hold the lock for a moment when they look for the instance."""
    for _ in range(10):
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.03)
    raise _already(home)


def running(home: Path) -> Instance | None:
    """The instance that runs in a home now. What a killed one left behind doesn't count."""
    try:
        with (home / "up.lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except FileNotFoundError:
        return None
    except BlockingIOError:
        pass
    try:
        return Instance(**json.loads(_state_file(home).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _already(home: Path) -> Failure:
    instance = running(home)
    if instance is None:
        return Failure(f"another `headrace up` is just starting or stopping in {home}", "wait for it, or use --home")
    return Failure(
        f"`headrace up` runs in {home} already (process {instance.pid}): API {instance.api_url}"
        + (f", Flower {instance.flower_url}" if instance.flower_url else ""),
        "use it, stop it with Ctrl-C in its terminal, or start another one with --home",
    )


def api_url(flag: str | None) -> str:
    """Where the API is: --url, HEADRACE_API_URL, the running instance, the default."""
    given = flag or os.environ.get("HEADRACE_API_URL")
    if given:
        return (given if "://" in given else f"http://{given}").rstrip("/")
    instance = running(_home())
    return instance.api_url if instance else DEFAULT_API_URL


def _home() -> Path:
    from settings import get_settings

    return get_settings().home


def default_model() -> str:
    """The model that a job names when its sender doesn't: the running instance's, or the configured one."""
    from settings import get_settings

    settings = get_settings()
    instance = running(settings.home)
    if instance is not None and not settings.model.model_fields_set:
        return instance.model
    return settings.model.name


def instance_settings() -> Settings:
    """The settings of this process, with the running instance's broker and database where none are named."""
    from settings import get_settings, settings_with

    settings = get_settings()
    instance = running(settings.home)
    if instance is None:
        return settings
    return settings_with(
        redis_url=None if broker_given(settings) else instance.broker_url,
        database_url=None if database_given(settings) else instance.database_url,
    )


def ledger_url(settings: Settings) -> str:
    """The ledger's URL. Raises Failure if no ledger can be there."""
    from headrace.urls import masked
    from sqlalchemy.exc import ArgumentError

    from ledger.database import ledger_url as parse

    url = "the database's URL"
    try:
        url = settings.ledger_url
        parse(url)
    except (ArgumentError, ValueError) as error:
        raise Failure(
            f"{masked(url)} is no database for the ledger: {error}",
            "SQLite and PostgreSQL are supported: set HEADRACE_DATABASE_URL (or DATABASE_URL) to sqlite:////PATH or "
            "postgresql://USER:PASSWORD@HOST/NAME",
            Exit.USAGE,
        ) from None
    return url


def require_urls(settings: Settings) -> None:
    """Raise unless a process can be started with these URLs: Failure, or `headrace.urls.BadUrl` for the broker's."""
    assert settings.broker_url
    ledger_url(settings)


def broker_given(settings: Settings) -> bool:
    """Whether the user named a broker, rather than leaving it to the default."""
    return bool(settings.redis_url or os.environ.get("REDIS_URL") or os.environ.get("CELERY_BROKER_URL"))


def database_given(settings: Settings) -> bool:
    """Whether the user named a database, rather than leaving it to the default."""
    return bool(settings.database_url or os.environ.get("DATABASE_URL"))
