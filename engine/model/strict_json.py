"""JSON in which a name that is there twice is an error, and not the last one's value. No torch here."""

from __future__ import annotations

import json
from typing import Any


def loads(text: str | bytes) -> Any:
    """As `json.loads`. Raises ValueError for a name that an object has more than once."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} is there more than once")
    return found
