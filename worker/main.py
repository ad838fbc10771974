"""`headrace worker`: Celery's worker with everything set."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from settings import Settings

LEAN = ("--without-gossip", "--without-mingle")
"""Gossip leaves lists behind on Redis that nobody reads; mingle makes each start wait for the other workers."""


def worker_arguments(extra: Sequence[str] = ()) -> list[str]:
    """Arguments of the `celery` command; `extra` ones come last and win."""
    return ["-A", "worker.app", "worker", "-P", "custom", "--loglevel", "INFO", *LEAN, *extra]


def run_worker(settings: Settings, extra: Sequence[str] = ()) -> int:
    """Run a worker for `settings.model` in this process until it is told to leave; its exit status."""
    from celery.bin.celery import main

    from worker.app import app, configure

    configure(app, settings)
    sys.argv = ["celery", *worker_arguments(extra)]
    try:
        main()
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    return os.EX_OK
