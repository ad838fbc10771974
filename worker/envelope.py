"""Messages whose envelope the transport can't read: they are given one that it can, and say what was wrong."""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from types import TracebackType
from typing import Any, cast

from kombu.transport import virtual
from pydantic_core import from_json


class BrokenEnvelope(ValueError):
    """What stands around the message's body is not what Celery writes."""


PLAIN = ("application/json", "utf-8")
_MARKED = b'"__type__"'
"""In a body in which kombu has written something that JSON doesn't have, a date for one."""


def read(text: bytes) -> Any:
    """JSON; ValueError if it is none. The standard library reads what only it takes for JSON, as lone surrogates."""
    try:
        return from_json(text)
    except ValueError:
        return json.loads(text)


class JobMessage(virtual.Message):
    """A message that exists whatever its payload is: a broken one goes to `Consumer.on_decode_error`, with its id."""

    def __init__(self, payload: Any, channel: Any = None, **options: Any) -> None:
        try:
            super().__init__(payload, channel=channel, **options)  # type: ignore[no-untyped-call]
            require_readable(self)
        except Exception as exc:
            why = f"the message's envelope is broken: {type(exc).__name__}: {exc}"
            super().__init__(readable(payload), channel=channel)  # type: ignore[no-untyped-call]
            self.errors.append((BrokenEnvelope, BrokenEnvelope(why[:200]), cast("TracebackType", exc.__traceback__)))

    def _decode(self) -> Any:
        """As kombu does, but faster for plain JSON; what that can't read is kombu's to judge."""
        body = self.body
        if (self.content_type, self.content_encoding) == PLAIN and isinstance(body, bytes) and _MARKED not in body:
            with suppress(ValueError):
                return from_json(body)
        return super()._decode()  # type: ignore[no-untyped-call]


def require_readable(message: Any) -> None:
    """Raise TypeError unless the parts that the transport and the consumer rely on have the right types."""
    delivery = message.delivery_info
    named: dict[str, tuple[Any, type]] = {
        "properties": (message.properties, dict),
        "headers": (message.headers, dict),
        "delivery_tag": (message.delivery_tag, str),
        "delivery_info": (delivery, dict),
        "exchange": (delivery["exchange"], str),
        "routing_key": (delivery["routing_key"], str),
    }
    for name, (value, kind) in named.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} is of type {type(value).__name__}")


def readable(payload: Any) -> dict[str, Any]:
    """An envelope with nothing in it but the payload's text and the id that the task had."""
    headers = payload.get("headers") if isinstance(payload, dict) else None
    task_id = headers.get("id") if isinstance(headers, dict) else None
    return {
        "body": repr(payload),
        "headers": {"id": task_id},
        "properties": {
            "delivery_tag": str(uuid.uuid4()),
            "delivery_info": {"exchange": "", "routing_key": ""},
        },
    }
