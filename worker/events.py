"""Celery's events about jobs, many in one publication, each written once and by a fast encoder."""

from __future__ import annotations

from typing import Any

from celery.app.events import Events
from celery.events.dispatcher import EventDispatcher
from pydantic_core import to_json


class JobDispatcher(EventDispatcher):  # type: ignore[misc]  # Celery has no types
    """Sends what was buffered as JSON that is ready, instead of having kombu make it."""

    def _publish(self, event: Any, producer: Any, routing_key: str, **options: Any) -> None:
        if producer is None or not isinstance(event, list):
            super()._publish(event, producer, routing_key, **options)
            return
        try:
            producer.publish(
                to_json(event).decode(),
                routing_key=routing_key,
                exchange=self.exchange.name,
                declare=[self.exchange],
                content_type="application/json",
                content_encoding="utf-8",
                headers=self.headers,
                delivery_mode=self.delivery_mode,
            )
        except Exception:
            if not self.buffer_while_offline:
                raise
            self._outbound_buffer.append((event, routing_key))


class JobEvents(Events):  # type: ignore[misc]  # Celery has no types
    """`app.events` with that dispatcher."""

    dispatcher_cls = JobDispatcher
