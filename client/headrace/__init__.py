"""Submit LLM inference jobs to Headrace."""

from headrace.async_client import AsyncClient
from headrace.client import Client
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
    HeadraceError,
    JobFailed,
    JobTimeout,
    NotFound,
    Unavailable,
)
from headrace.events import JobEvent, StateEvent, TokenEvent
from headrace.producer import Producer

__all__ = [
    "ApiError",
    "AsyncClient",
    "BadRequest",
    "Choice",
    "Client",
    "Conflict",
    "ConnectionFailed",
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
    "TopLogprob",
    "Unavailable",
    "Usage",
]
