"""Turns what pydantic found wrong with a request into the one error that every door answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headrace.contract import JobRequest
from headrace.errors import BadRequest

MOST_TOLD = 8
"""Faults that one message tells."""
MESSAGE_CHARS = 4000
PARAM_CHARS = 200
"""A sender may name a field by megabytes; it isn't sent them back."""
_RIVALS = frozenset({"string_type", "list_type"})


def job_request(fields: object) -> JobRequest:
    """Validate a job request; raises BadRequest."""
    try:
        return JobRequest.model_validate(fields)
    except ValidationError as error:
        raise bad_request(error.errors(include_url=False, include_context=False), fields) from None


def bad_request(errors: Sequence[ErrorDetails], sent: object) -> BadRequest:
    """One error for all of `errors`: `param` is the first one's field, the message tells every one."""
    found = _without_rival_types([(field_path(error["loc"], sent), error) for error in errors])
    told: dict[str | None, str] = {}
    for param, error in found[:MOST_TOLD]:
        text = _sentence(error)
        if param not in told:
            told[param] = text
        elif text not in told[param]:
            told[param] += f", or {_lower(text)}"
    parts = [f"{_shown(param, PARAM_CHARS)}: {_lower(text)}" if param else text for param, text in told.items()]
    if len(found) > MOST_TOLD:
        parts.append(f"and {len(found) - MOST_TOLD} more")
    return invalid("; ".join(parts), next(iter(told)))


def invalid(message: str, param: str | None, code: str = "invalid_request", status: int = 400) -> BadRequest:
    """A BadRequest whose texts can be encoded and are short, whatever was sent."""
    message = _shown(message, MESSAGE_CHARS)
    param = None if param is None else _shown(param, PARAM_CHARS)
    return BadRequest(message, type="invalid_request_error", param=param, code=code, status=status)


def _shown(text: str, most_chars: int) -> str:
    text = text if len(text) <= most_chars else f"{text[: most_chars - 1]}…"
    return text.encode(errors="replace").decode()


def _without_rival_types(found: list[tuple[str | None, ErrorDetails]]) -> list[tuple[str | None, ErrorDetails]]:
    """Without "should be a string" where the value is a list and something in it is wrong, or the other way round."""
    real = {param or "" for param, error in found if error["type"] not in _RIVALS}

    def rival(param: str | None, error: ErrorDetails) -> bool:
        return error["type"] in _RIVALS and any(r == param or r.startswith(f"{param}.") for r in real)

    return [(param, error) for param, error in found if not rival(param, error)]


def field_path(loc: Sequence[int | str], sent: object) -> str | None:
    """The part of `loc` that names something in `sent` (or a field missing from it), as `messages.0.content`.

    Pydantic adds the names of union members and validators to a location; a user knows neither.
    """
    parts: list[str] = []
    here: Any = sent
    for index, key in enumerate(loc):
        if isinstance(here, dict) and isinstance(key, str):
            if key == "[key]":
                continue
            missing = key not in here
            if missing and index < len(loc) - 1:
                continue
            parts.append(key)
            here = here.get(key)
        elif isinstance(here, list | tuple) and isinstance(key, int) and key < len(here):
            parts.append(str(key))
            here = here[key]
    return ".".join(parts) or None


def _sentence(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return "Unknown field"
    if error["type"] in ("model_type", "model_attributes_type"):
        return "the request must be a JSON object"
    if error["type"] == "missing":
        return "Field required"
    return error["msg"].removeprefix("Value error, ")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
