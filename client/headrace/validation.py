"""Turns what pydantic found wrong with a request into the one error that every door answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headrace.contract import JobRequest
from headrace.errors import BadRequest


def job_request(fields: object) -> JobRequest:
    """Validate a job request; raises BadRequest."""
    try:
        return JobRequest.model_validate(fields)
    except ValidationError as error:
        raise bad_request(error.errors(include_url=False, include_context=False), fields) from None


def bad_request(errors: Sequence[ErrorDetails], sent: object) -> BadRequest:
    """One error for all of `errors`: `param` is the first one's field, the message tells every one."""
    told: dict[str | None, str] = {}
    for error in errors:
        param = field_path(error["loc"], sent)
        text = _sentence(error)
        if param in told and text not in told[param]:
            told[param] += f", or {_lower(text)}"
        else:
            told.setdefault(param, text)
    message = "; ".join(f"{param}: {_lower(text)}" if param else text for param, text in told.items())
    return BadRequest(message, type="invalid_request_error", param=next(iter(told)), code="invalid_request", status=400)


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
    if error["type"] == "missing":
        return "Field required"
    return error["msg"].removeprefix("Value error, ")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
