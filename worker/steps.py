"""Boot steps of the worker besides the pool and the consumer."""

from __future__ import annotations

from typing import Any

from celery import bootsteps

from ledger.contract import Windows
from ledger.relay import Relay
from ledger.retention import kept
from ledger.transport import CeleryTransport
from settings import get_settings


class RelayStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Every worker also relays: it sends what the ledger wants sent, and repairs what the broker lost."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, w: Any, **options: Any) -> None:
        super().__init__(w, **options)
        self._relay: Relay | None = None

    def start(self, w: Any) -> None:
        services = w.pool.services
        settings = get_settings()
        transport, view = (CeleryTransport(settings.broker_url, settings.signing_secret) for _ in range(2))
        relay = Relay(
            services.ledger,
            transport,
            services.owner,
            settings.relay_interval_s,
            view,
            Windows(settings.queue.window_jobs, settings.model.tenant_weights),
            settings.model.aging_s,
            kept(settings.retention),
        )
        services.writer.when_claimed(relay.wake)
        services.metrics.watch_ledger(lambda: services.writer.cpu_s + relay.cpu_s)
        relay.start()
        self._relay = relay

    def stop(self, w: Any) -> None:
        if self._relay is not None:
            self._relay.stop()
            self._relay = None

    terminate = stop
