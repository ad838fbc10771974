"""How the worker hears that it is to leave at once (SIGQUIT, or a second Ctrl-C)."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery.apps import worker as celery_worker

_INSTALLERS = ("install_worker_term_handler", "install_worker_term_hard_handler")


def leave_by_the_loop() -> None:
    """Have a signal only be noted, for Celery's loop to end, and the pool to hand the jobs back then.

    Celery would stop the pool within the signal's handler, and so wherever the hub's thread happens to be: in a job's
    greenlet, between taking a call from its inbox and making it, in a command to the broker.
    """
    for name in _INSTALLERS:
        install: Any = getattr(celery_worker, name)
        setattr(celery_worker, name, partial(install.func, **{**install.keywords, "callback": None}))
