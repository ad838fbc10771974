"""Reads a request's JSON body: bounded while it arrives, and strictly JSON."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from anyio import to_thread
from headrace.errors import BadRequest
from headrace.validation import PARAM_CHARS, invalid
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

LARGE_BYTES = 64 * 1024
"""From here on a body is parsed on a thread."""


async def read_json(request: Request, max_bytes: int) -> Any:
    """The body's value. Raises BadRequest: 415 for another type, 413 for too much, 400 for what isn't JSON."""
    _check_type(request)
    body = await _read(request, max_bytes)
    if len(body) < LARGE_BYTES:
        return parse_json(body)
    return await to_thread.run_sync(parse_json, body)


def parse_json(body: bytes) -> Any:
    """The value of a JSON text (RFC 8259), without its usual extensions: no NaN, no repeated names, valid UTF-8."""
    if not body.strip():
        raise invalid("the body is empty, and should be a JSON object", None, "invalid_json")
    try:
        from_json(body, allow_inf_nan=False)
        return json.loads(body, object_pairs_hook=_unique, parse_float=_finite)
    except BadRequest:
        raise
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}", None, "invalid_json") from None


def _finite(text: str) -> float:
    """A number that a float holds: `1e999` is JSON, and infinite to everybody who reads it."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:PARAM_CHARS]} is too large")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise invalid(f"the name {name[:PARAM_CHARS]!r} stands twice in one object", name, "invalid_json")
        seen.add(name)
    raise AssertionError("unreachable")


def _check_type(request: Request) -> None:
    declared = request.headers.get("content-type", "application/json").lower()
    kind, *parameters = [part.strip() for part in declared.split(";")]
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        message = f"the body must be JSON (Content-Type: application/json), not {kind or 'nothing'}"
        raise invalid(message, None, "unsupported_media_type", 415)
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name == "charset" and value.strip('"') not in ("utf-8", "utf8"):
            raise invalid(f"JSON is UTF-8, not {value}", None, "unsupported_media_type", 415)


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect:
        raise invalid("the body ended early", None, "incomplete_body") from None
    return b"".join(chunks)


def _too_large(max_bytes: int) -> NoReturn:
    raise invalid(f"the body is larger than {max_bytes} bytes", None, "body_too_large", 413)
