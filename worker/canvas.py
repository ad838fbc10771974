"""What a message asks to be done after its job: callbacks, the rest of a chain, a chord's body."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MOST_NESTED = 20


def canvas_fault(embed: Mapping[str, Any]) -> str | None:
    """Why Celery's tracer could not do it. It would say so with a traceback, after the job has run."""
    for name in ("callbacks", "errbacks", "chain"):
        if not _are_signatures(embed.get(name)):
            return f"{name} must be a list of signatures"
    if embed.get("chord") is not None and not _is_signature(embed["chord"]):
        return "chord must be a signature"
    return None


def chained_ids(embed: Mapping[str, Any]) -> Iterator[str]:
    """Ids of the tasks that come after this one in its chain: none of them starts if it fails."""
    for signature in embed.get("chain") or ():
        task_id = signature["options"].get("task_id") if signature.get("options") else None
        if isinstance(task_id, str) and task_id:
            yield task_id


def _are_signatures(value: object, depth: int = 0) -> bool:
    if value is None:
        return True
    return isinstance(value, list) and all(_is_signature(one, depth) for one in value)


def _is_signature(value: object, depth: int = 0) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("task"), str) or depth > MOST_NESTED:
        return False
    options = value.get("options")
    kinds: dict[str, type] = {"args": list, "kwargs": dict, "options": dict}
    if any(not isinstance(value.get(name), kind | None) for name, kind in kinds.items()):
        return False
    return not options or all(_are_signatures(options.get(name), depth + 1) for name in ("link", "link_error"))
