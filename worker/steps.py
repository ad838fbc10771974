"""Boot steps of the worker besides the pool and the consumer."""

from __future__ import annotations

from typing import Any

from celery import bootsteps


class RelayStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Every worker also relays: it sends what the ledger wants sent, and repairs what the broker lost."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, w: Any, **options: Any) -> None:
        super().__init__(w, **options)
        self._relay: Any = None

    def start(self, w: Any) -> None:
        from ledger.relay import Relay

        from settings import get_settings

        self._relay = Relay(get_settings())
        self._relay.start()

    def stop(self, w: Any) -> None:
        if self._relay is not None:
            self._relay.stop()
            self._relay = None

    terminate = stop
