"""Requests and their outputs. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from engine.params import RequestRefused, SamplingParams

__all__ = [
    "Choice", "EngineRequest", "FinishReason", "Progress", "RequestMetrics", "RequestOutput", "RequestRefused",
    "SamplingParams", "TokenDelta", "TokenLogprob", "TopLogprob",
]  # fmt: skip


class FinishReason(StrEnum):
    """Why a request ended. The values are those of the job contract."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TopLogprob(NamedTuple):
    """A token that might have come, and how likely it was: the raw log-softmax, at least -9999."""

    token_id: int
    token: str
    """Its text, with U+FFFD where its bytes are no whole character; the name of a special one."""
    bytes: bytes
    logprob: float


class TokenLogprob(NamedTuple):
    """The token that came, its place among all, and the likeliest, which it may or may not be one of."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """What one completion had already when its request was taken over from another engine of the same model."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token, if the request asks for them."""
    index: int = 0

    @property
    def without_last(self) -> Progress:
        """The same up to its last token."""
        return Progress(self.token_ids[:-1], self.logprobs[:-1], self.index)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt for the engine: text, token ids or chat messages (`{"role", "content"}`), exactly one of them."""

    id: str
    params: SamplingParams
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[dict[str, str], ...] | None = None
    priority: int = 0
    """Lower runs first; equal ones in order of arrival."""
    tenant: str = "default"
    """Whose share of the tokens it counts against."""
    deadline_s: float | None = None
    """Monotonic moment after which it isn't wanted: it ends with reason `abort` then, waiting or running."""
    adapter: str | None = None
    """The name of the adapter that computes it; None is the model as it is."""
    namespace: str = ""
    """Prefixes are shared with requests of the same namespace only."""
    embeds: bool = False
    """Whether a vector is wanted, and no text; `max_tokens` is 0 then."""
    progress: tuple[Progress, ...] = ()
    """Where its completions go on from, at most one for each. Its first deltas repeat these tokens and their text."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Moments on this process's monotonic clock, seconds, and counts."""

    arrived_s: float
    admitted_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    finished_s: float | None
    cached_tokens: int = 0
    preemptions: int = 0
    mean_batch_size: float | None = None
    max_batch_size: int | None = None


@dataclass(slots=True)
class TokenDelta:
    """What one step added to a request's output: complete characters only, never part of a stop string.

    Not frozen, as that makes it three times as slow to build, and each step builds one for each sequence.
    """

    request_id: str
    text: str
    offset: int
    """Characters of output before `text`."""
    token_ids: tuple[int, ...]
    index: int = 0
    """Which of the request's completions it is."""
    position: int = 0
    """Tokens of that completion before these."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids`, if they were asked for."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion of a finished request."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...] | None
    """One for each of `token_ids`, if they were asked for."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. The deltas' texts joined equal `text`, always.

    Text and tokens are those of its first completion. The reason is `error` or `abort` if any
    completion ended so, else the first one's.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    metrics: RequestMetrics
    error: str | None = None
    """For reason `error`: what went wrong."""
    error_code: str | None = None
    """A reason of the job contract: for `error` `invalid_request`, `context_length_exceeded` and others; for `abort`
    `deadline_exceeded` if that was the cause."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One for each token of the prompt, None for the first, as far as they were computed."""
    embedding: tuple[float, ...] | None = None
    """The vector that was asked for, if all of the text was computed."""
    choices: tuple[Choice, ...] = ()
    """Every completion, in order; none of a request that never ran."""
