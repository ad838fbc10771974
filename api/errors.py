"""Every error leaves as `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import redis
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from headrace.contract import ErrorBody, Job
from headrace.errors import ApiError, Conflict, NotFound, TooManyRequests, Unauthorized, Unavailable
from headrace.validation import bad_request, invalid
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ledger.contract import IdempotencyConflict, IllegalTransition, LedgerUnavailable

RETRY_AFTER_S = 2


class ErrorAnswer(BaseModel):
    """What every answer with status 400 or above looks like."""

    error: ErrorBody


class RateLimited(TooManyRequests):
    """Requests or tokens come faster than they may; `headers` tell what is left of the limit, and until when."""

    def __init__(self, message: str, headers: Mapping[str, str], retry_after_s: float) -> None:
        super().__init__(
            message, type="rate_limit_error", code="rate_limit_exceeded", status=429, retry_after_s=retry_after_s
        )
        self.headers = headers


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI entries of a guarded route's errors; every one may answer 401, 403, 429 and 503."""
    return {
        status: {"model": ErrorAnswer, "description": _MEANING[status]}
        for status in sorted({*statuses, 401, 403, 429, 503})
    }


_MEANING = {
    400: "The request is wrong: `param` names the field, `message` says what is wrong with it",
    401: "The server asks for an API key, and there is no valid one",
    403: "The API key lacks the scope, or is another tenant's; or the request is for another machine's name",
    404: "Unknown job or model",
    409: "The job's state, or the idempotency key, forbids it",
    413: "The body is too large",
    415: "The body is not declared to be JSON",
    429: "Too much waits already, or requests or tokens come too fast: `Retry-After` says when to ask again",
    503: "The database, or the broker, is away: `Retry-After` says when to ask again",
}


def unknown_job(job_id: str) -> NotFound:
    return NotFound(
        f"there is no job {job_id!r}", type="invalid_request_error", param="id", code="job_not_found", status=404
    )


def no_dead_letter(job: Job) -> NotFound:
    why = f", with {job.error.code}" if job.error and job.error.code.value != job.status.value else ""
    message = f"job {job.id!r} is no dead letter: it is {job.status}{why}"
    return NotFound(message, type="invalid_request_error", param="id", code="not_a_dead_letter", status=404)


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    body = ErrorBody(message=error.message, type=error.type, param=error.param, code=error.code)
    pause_s = error.retry_after_s or (RETRY_AFTER_S if isinstance(error, Unavailable) else None)
    more = {} if pause_s is None else {"Retry-After": str(math.ceil(pause_s))}
    if isinstance(error, Unauthorized):
        more["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": body.model_dump()}, error.status, headers={**more, **(headers or {})})


def internal_error() -> JSONResponse:
    return error_response(ApiError("internal error; the server's log has the cause", type="server_error", status=500))


def install(app: FastAPI) -> None:
    """Register the handlers of everything that a route may raise."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return error_response(error, error.headers if isinstance(error, RateLimited) else None)

    @app.exception_handler(RequestValidationError)
    async def invalid_parameter(_: Request, error: RequestValidationError) -> Response:
        details = [{**detail, "loc": detail["loc"][1:]} for detail in error.errors()]
        sent = {detail["loc"][0]: detail["input"] for detail in details if detail["loc"]}
        return error_response(bad_request(details, sent))  # type: ignore[arg-type]

    @app.exception_handler(HTTPException)
    async def by_the_framework(request: Request, error: HTTPException) -> Response:
        headers = error.headers or {}
        if error.status_code == 404:
            path = f"there is nothing at {request.url.path}"
            return error_response(NotFound(path, type="invalid_request_error", code="not_found", status=404))
        if error.status_code == 405:
            message = f"{request.method} is not allowed at {request.url.path}"
            return error_response(invalid(message, None, "method_not_allowed", 405), headers)
        return error_response(invalid(str(error.detail), None, status=error.status_code), headers)

    @app.exception_handler(IdempotencyConflict)
    async def other_body(_: Request, __: IdempotencyConflict) -> Response:
        message = "this idempotency key was used before, with another body"
        return error_response(
            Conflict(
                message,
                type="idempotency_error",
                param="idempotency_key",
                code="idempotency_key_reused",
                status=409,
            )
        )

    @app.exception_handler(IllegalTransition)
    async def wrong_state(_: Request, error: IllegalTransition) -> Response:
        return error_response(Conflict(str(error), type="invalid_request_error", code="wrong_state", status=409))

    @app.exception_handler(LedgerUnavailable)
    async def database_away(_: Request, __: LedgerUnavailable) -> Response:
        return error_response(_away("the database can't be reached now; nothing was changed", "database_unavailable"))

    @app.exception_handler(redis.RedisError)
    async def broker_away(_: Request, __: redis.RedisError) -> Response:
        return error_response(_away("the broker can't be reached now", "broker_unavailable"))


def _away(message: str, code: str) -> Unavailable:
    return Unavailable(f"{message}; try again", type="server_error", code=code, status=503)
