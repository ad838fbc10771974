"""Requests, their sampling parameters and their outputs. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended. The values are those of the job contract."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestRefused(ValueError):
    """The request can't run on this model; the message says why, `code` is a reason of the job contract."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and meanings as in vLLM and OpenAI's API.

    `temperature` under 1e-5 and `top_k=1` are greedy. `top_k` -1 and 0 keep every token; `top_p=0`
    keeps the likeliest token; `max_tokens=0` gives an empty text with reason `length`. Nothing stops
    a request before `min_tokens`. `ignore_eos` leaves the user's own `stop_token_ids` in force.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Raise `RequestRefused` for values without a meaning. `stop` may be given as one string, or any sequence."""
        stop: object = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._require("max_tokens", self.max_tokens >= 0, "at least 0")
        self._require("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens={self.max_tokens}")
        self._require("temperature", 0 <= self.temperature < math.inf, "a finite number, at least 0")
        self._require("top_p", 0 <= self.top_p <= 1, "from 0 to 1")
        self._require("top_k", self.top_k >= -1, "at least -1")
        self._require("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        self._require("seed", self.seed is None or 0 <= self.seed < 2**63, "from 0 to 2**63 - 1")
        self._require("stop", all(self.stop), "strings that are not empty")

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise RequestRefused("invalid_request", f"{name} must be {what}, got {getattr(self, name)!r}", name)


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
    namespace: str = ""
    """Prefixes are shared with requests of the same namespace only."""


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


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one step added to a request's output: complete characters only, never part of a stop string."""

    request_id: str
    text: str
    offset: int
    """Characters of output before `text`."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. The deltas' texts joined equal `text`, always."""

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
