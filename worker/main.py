"""`headrace worker`: Celery's worker with everything set."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pydantic import SecretStr

from settings import Settings
from worker.app import POOL

LEAN = ("--without-gossip", "--without-mingle")
"""Gossip leaves lists behind on Redis that nobody reads; mingle makes each start wait for the other workers."""


def worker_arguments(extra: Sequence[str] = ()) -> list[str]:
    """Arguments of the `celery` command; `extra` ones come last and win."""
    return ["-A", "worker.app", "worker", "-P", "custom", "--loglevel", "INFO", *LEAN, *extra]


def environment(settings: Settings) -> dict[str, str]:
    """The settings as the variables that `get_settings` reads, so that a new process has the same ones."""
    return dict(_variables("HEADRACE", settings.model_dump()))


def run_worker(settings: Settings, extra: Sequence[str] = ()) -> NoReturn:
    """Become a Celery worker for `settings.model`. The queue and the node are called after the model."""
    env = {**os.environ, **environment(settings), "CELERY_CUSTOM_WORKER_POOL": POOL}
    os.execve(sys.executable, [sys.executable, "-m", "celery", *worker_arguments(extra)], env)  # noqa: S606


def _variables(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Nested values joined as pydantic-settings reads them: `HEADRACE_` once, then `__` at each level."""
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        joint = "_" if prefix == "HEADRACE" else "__"
        variable = f"{prefix}{joint}{name.upper()}"
        if isinstance(value, Mapping):
            found += _variables(variable, value)
        elif value is not None:
            found.append((variable, value.get_secret_value() if isinstance(value, SecretStr) else str(value)))
    return found
