"""Everything that this package raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.contract import ErrorBody, Job


class HeadraceError(Exception):
    """Base of every error of this package."""


class ConnectionFailed(HeadraceError):
    """The server, or the broker, can't be reached or did not answer in time."""


class ApiError(HeadraceError):
    """A request was refused. `param` names the field as it was written, `code` is for programs.

    `retry_after_s` is how long the server asks to wait before it is tried again, if it does.
    """

    def __init__(
        self,
        message: str,
        *,
        type: str = "api_error",  # noqa: A002 - OpenAI's name for it
        param: str | None = None,
        code: str | None = None,
        status: int = 500,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        told = (self.message, self.type, self.param, self.code, self.status, self.retry_after_s)
        return _rebuild, (type(self), *told)


def _rebuild(
    cls: type[ApiError],
    message: str,
    kind: str,
    param: str | None,
    code: str | None,
    status: int,
    retry_after_s: float | None,
) -> ApiError:
    return cls(message, type=kind, param=param, code=code, status=status, retry_after_s=retry_after_s)


class BadRequest(ApiError):
    """The request can't be right, whenever it is sent (HTTP 400, 413, 415)."""


class Unauthorized(ApiError):
    """The server asks for an API key, and got none that is valid (HTTP 401)."""


class Forbidden(ApiError):
    """The API key doesn't allow it (HTTP 403)."""


class NotFound(ApiError):
    """There is no such job, model or path (HTTP 404)."""


class Conflict(ApiError):
    """The job's state, or an idempotency key, forbids it (HTTP 409)."""


class Unavailable(ApiError):
    """The server can't do it now (HTTP 502, 503, 504): try again later."""


class TooManyRequests(Unavailable):
    """The queue is full, or requests come too fast (HTTP 429): try again after `retry_after_s`."""


_BY_STATUS: dict[int, type[ApiError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    405: BadRequest,
    409: Conflict,
    413: BadRequest,
    415: BadRequest,
    429: TooManyRequests,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


def api_error(status: int, body: ErrorBody, retry_after_s: float | None = None) -> ApiError:
    """The error for an answer with this status."""
    cls = _BY_STATUS.get(status, ApiError)
    return cls(
        body.message, type=body.type, param=body.param, code=body.code, status=status, retry_after_s=retry_after_s
    )


class JobFailed(HeadraceError):
    """The job ended without succeeding; `job` has the reason, and what was generated before.

    It travels through Celery's result backend, so its only argument is JSON.
    """

    def __init__(self, job: Job | Mapping[str, Any]) -> None:
        self.job = Job.model_validate(job)
        super().__init__(self.job.model_dump(mode="json", exclude_none=True))

    def __str__(self) -> str:
        why = f": {self.job.error.code}: {self.job.error.message}" if self.job.error else ""
        return f"job {self.job.id} {self.job.status}{why}"


class JobTimeout(HeadraceError, TimeoutError):
    """The job had not ended in time. It goes on; `job` is its last known state, if there was one, and `hint` what may
    keep it."""

    def __init__(self, job_id: str, timeout_s: float, job: Job | None = None, hint: str | None = None) -> None:
        super().__init__(job_id, timeout_s, job, hint)
        self.job_id = job_id
        self.timeout_s = timeout_s
        self.job = job
        self.hint = hint

    def __str__(self) -> str:
        seen = f" (it is {self.job.status})" if self.job else ""
        why = f"; {self.hint}" if self.hint else ""
        return f"job {self.job_id} had not ended after {round(self.timeout_s, 1):g} s{seen}{why}"
