"""The job contract: what a producer sends, and what every door answers.

All times are timezone-aware UTC. All durations end in their unit (`_s`, `_ms`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StringConstraints,
    model_validator,
)

from headrace.result import Choice as Choice
from headrace.result import JobResult as JobResult
from headrace.result import TokenLogprob as TokenLogprob
from headrace.result import TopLogprob as TopLogprob
from headrace.result import Usage as Usage
from headrace.sampling import SamplingFields
from headrace.tracing import checked as checked_traceparent

MAX_PROMPT_CHARS = 2_000_000
"""No context of any supported model holds more text than this."""

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]
JobId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Priority(StrEnum):
    """How urgent a job is. `wire.broker_priority` is the one place that maps it to numbers."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class JobStatus(StrEnum):
    """Where a job stands. `ledger.states` holds the transitions between these."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        return self not in (JobStatus.QUEUED, JobStatus.RUNNING)


class Reason(StrEnum):
    """Why a job ended without succeeding: `Job.error.code`."""

    INVALID_REQUEST = "invalid_request"
    MODEL_NOT_FOUND = "model_not_found"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    TEMPLATE_ERROR = "template_error"
    ENGINE_ERROR = "engine_error"
    TIME_LIMIT = "time_limit"
    DEAD_LETTER = "dead_letter"
    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, StringConstraints(max_length=MAX_PROMPT_CHARS)]


LAST_YEAR = 9000
"""Far enough from the last moment that a datetime holds for any time zone that a reader has."""


def _in_utc(moment: datetime) -> datetime:
    try:
        in_utc = moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("the moment is out of range in UTC") from None
    if in_utc.year > LAST_YEAR:
        raise ValueError(f"the moment is out of range: after the year {LAST_YEAR}")
    return in_utc


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]
Traceparent = Annotated[str, AfterValidator(checked_traceparent)]


_LATER = frozenset((
    "n", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids",
    "logprobs", "prompt_logprobs", "embed", "response_format", "guided_regex", "guided_choice", "guided_grammar",
    "adapter",
))  # fmt: skip

MOST_FIELDS = 100
MOST_AGE_S = 30 * 86400.0
"""An id that is older, or of the future, was not made when its job was sent."""
MOST_METADATA = 16


def _few(pairs: Any) -> Any:
    """Count before looking: a fault for each of a million entries would cost more memory than the entries."""
    if isinstance(pairs, dict) and len(pairs) > MOST_METADATA:
        raise ValueError(f"at most {MOST_METADATA} pairs, got {len(pairs)}")
    return pairs


class JobRequest(SamplingFields):
    """What to generate, and how the job is to be treated.

    Exactly one of `prompt` (text, or token ids) and `messages` is given. Sampling parameters carry
    the names and meanings of OpenAI's and vLLM's APIs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    model: Name
    prompt: (
        Annotated[str, StringConstraints(min_length=1, max_length=MAX_PROMPT_CHARS)]
        | Annotated[
            list[Annotated[int, Field(ge=0, strict=True)]],
            Field(min_length=1, max_length=MAX_PROMPT_CHARS, fail_fast=True),
        ]
        | None
    ) = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)] | None = None

    adapter: Annotated[
        Name | None, Field(description="The name of an adapter of the model's; without one the model as it is")
    ] = None
    embed: Annotated[
        StrictBool, Field(description="Make a vector of the text instead of another text; sampling is ignored")
    ] = False
    stream: Annotated[
        StrictBool, Field(description="Publish tokens as they are produced, not only changes of state")
    ] = True
    priority: Priority = Priority.NORMAL
    deadline: Annotated[Moment | None, Field(description="After it the job never starts, and stops if it runs")] = None
    ttl_s: Annotated[
        float | None, Field(gt=0, le=30 * 86400, allow_inf_nan=False, strict=True, description="A deadline, from now")
    ] = None
    idempotency_key: Annotated[str, StringConstraints(max_length=255, pattern=r"^[^\x00-\x1f\x7f]+$")] | None = None
    tenant: Name = "default"
    metadata: Annotated[
        dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
        BeforeValidator(_few),
        Field(default_factory=dict, max_length=MOST_METADATA),
    ]
    max_attempts: Annotated[int, Field(ge=1, le=100, strict=True)] = 3
    traceparent: Annotated[
        Traceparent | None, Field(description="The span that asks for the job, as W3C Trace Context writes it")
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and len(fields) > MOST_FIELDS:
            raise ValueError(f"{len(fields)} fields are far too many")
        return fields

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of 'prompt' and 'messages'")
        self.check_sampling()
        if self.deadline is not None and self.ttl_s is not None:
            raise ValueError("give at most one of 'deadline' and 'ttl_s'")
        return self

    def deadline_from(self, now: datetime) -> datetime | None:
        """The moment after which the job is not wanted, counting `ttl_s` from `now`."""
        return now + timedelta(seconds=self.ttl_s) if self.ttl_s is not None else self.deadline

    def body(self) -> dict[str, Any]:
        """The request as JSON-ready values, as it is stored.

        Fields that came after the first version are left out at their defaults: a worker of that
        version still takes the job, and equal requests have equal fingerprints across an upgrade.
        The `traceparent` is kept beside it: it is another one each time that the same is asked for.
        """
        fields = type(self).model_fields
        said = {name for name in _LATER & self.model_fields_set if getattr(self, name) != fields[name].default}
        return self.model_dump(mode="json", exclude={"traceparent", *(_LATER - said)})

    def fingerprint(self) -> str:
        """SHA-256 of what was asked, without the idempotency key: equal for equal work."""
        return fingerprint(self.body())


def fingerprint(body: dict[str, Any]) -> str:
    """The same of a request's body."""
    asked = {name: value for name, value in body.items() if name != "idempotency_key"}
    return hashlib.sha256(_canonical.encode(asked).encode()).hexdigest()


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


class Timings(BaseModel):
    """Where the time of a job went, in milliseconds; names as in vLLM's request metrics where it has one.

    `queue_time_ms` runs from acceptance to the engine's admission, on the ledger's clock and then
    the worker's; all others are differences of one process's monotonic clock.
    """

    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None
    """From the engine's receipt of the request to its first token."""
    prefill_time_ms: float | None = None
    """From admission to the first token."""
    generation_time_ms: float | None = None
    """From admission to the last token."""
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    commit_time_ms: float | None = None
    """From the last token to the ledger's commit of the result."""
    total_time_ms: float | None = None
    """From acceptance to commit."""
    cached_tokens: int = 0
    preemptions: int = 0
    attempts: int = 0
    mean_batch_size: float | None = None
    """Sequences in the engine's steps that this job took part in, averaged over those steps."""
    max_batch_size: int | None = None
    worker: str | None = None
    device: str | None = None
    dtype: str | None = None
    model_revision: str | None = None


class JobError(BaseModel):
    """Why a job did not succeed."""

    code: Reason
    message: str


class JobUrls(BaseModel):
    self: str
    events: str
    cancel: str
    retry: str


class Job(BaseModel):
    """A job as every door shows it."""

    id: str
    object: Literal["job"] = "job"
    model: str
    status: JobStatus
    priority: Priority
    tenant: str
    metadata: dict[str, str] = {}
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    deadline: datetime | None = None
    attempt: int = 0
    max_attempts: int = 3
    cancel_requested: bool = False
    traceparent: str | None = None
    worker: str | None = None
    result: JobResult | None = None
    error: JobError | None = None
    timings: Timings | None = None
    urls: JobUrls | None = None


class JobPage(BaseModel):
    """A page of jobs, newest first; `after=last_id` asks for the next one."""

    object: Literal["list"] = "list"
    data: list[Job]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class LostAttempt(BaseModel):
    """An attempt that ended with its worker: the worker died, or could not renew its lease."""

    attempt: int
    worker: str
    started_at: datetime | None = None
    lost_at: datetime
    companions: int
    """Other jobs that the same worker lost."""


class DeadLetter(Job):
    """A job that used up its attempts, each lost with a worker. It stays until it is replayed or purged."""

    lost_attempts: list[LostAttempt] = []
    """Oldest first; also those before a replay."""


class ModelCard(BaseModel):
    """What the door has to know of a model to refuse a bad request without loading it."""

    id: Name
    """The alias that jobs name."""
    revision: str
    """Hash that changes with the weights, the tokenizer or the template."""
    max_seq_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    chat: bool
    """Whether the model has a chat template."""
    adapters: list[Name] = []
    """Names of the adapters that its jobs may ask for."""


class ErrorBody(BaseModel):
    """The inside of `{"error": ...}`, in OpenAI's form."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


def new_job_id(now_s: float | None = None) -> str:
    """A UUIDv7 (RFC 9562): unique, and sorted by the time it was made."""
    ms = int((time.time() if now_s is None else now_s) * 1000)
    rand = int.from_bytes(os.urandom(10), "big")
    value = (ms & (2**48 - 1)) << 80 | 0x7 << 76 | (rand >> 68) << 64 | 0b10 << 62 | rand & (2**62 - 1)
    digits = f"{value:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


_made_id = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def id_age_s(job_id: str, now_s: float) -> float:
    """Seconds from the id's making, by its maker's clock, to `now_s` (Unix time); 0 if it is none of `new_job_id`'s."""
    made = _made_id.fullmatch(job_id)
    if made is None:
        return 0.0
    age_s = now_s - int(made[1] + made[2], 16) / 1000
    return age_s if 0.0 <= age_s <= MOST_AGE_S else 0.0


def utc_now() -> datetime:
    return datetime.now(UTC)


def job_kwargs(request: JobRequest) -> dict[str, Any]:
    """The request as JSON-ready keyword arguments, without the fields that were left at their defaults."""
    return request.model_dump(mode="json", exclude_unset=True)
