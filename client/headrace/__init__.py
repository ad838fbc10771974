"""Submit LLM inference jobs to Headrace.

The clients are loaded when they are first asked for: who only reads the contract needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from headrace.contract import (
    Choice,
    Job,
    JobError,
    JobPage,
    JobRequest,
    JobResult,
    JobStatus,
    Message,
    ModelCard,
    Priority,
    Reason,
    Timings,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from headrace.errors import (
    ApiError,
    BadRequest,
    Conflict,
    ConnectionFailed,
    Forbidden,
    HeadraceError,
    JobFailed,
    JobTimeout,
    NotFound,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from headrace.events import JobEvent, StateEvent, TokenEvent

if TYPE_CHECKING:
    from headrace.async_client import AsyncClient
    from headrace.client import Client
    from headrace.producer import Producer

__all__ = [
    "ApiError",
    "AsyncClient",
    "BadRequest",
    "Choice",
    "Client",
    "Conflict",
    "ConnectionFailed",
    "Forbidden",
    "HeadraceError",
    "Job",
    "JobError",
    "JobEvent",
    "JobFailed",
    "JobPage",
    "JobRequest",
    "JobResult",
    "JobStatus",
    "JobTimeout",
    "Message",
    "ModelCard",
    "NotFound",
    "Priority",
    "Producer",
    "Reason",
    "StateEvent",
    "Timings",
    "TokenEvent",
    "TokenLogprob",
    "TooManyRequests",
    "TopLogprob",
    "Unauthorized",
    "Unavailable",
    "Usage",
]

_CLIENTS = {
    "AsyncClient": "headrace.async_client",
    "Client": "headrace.client",
    "Producer": "headrace.producer",
}


def __getattr__(name: str) -> object:
    if name not in _CLIENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_CLIENTS[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *_CLIENTS]
