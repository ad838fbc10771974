"""The keyword arguments of `submit`, typed for editors and type checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypedDict

from headrace.contract import JobRequest, Message, Priority
from headrace.sampling import JsonObject, JsonSchema, PlainText
from headrace.validation import job_request

Prompt = str | Sequence[int]
ResponseFormat = PlainText | JsonObject | JsonSchema
Messages = Sequence[Message | Mapping[str, Any]]


class JobParams(TypedDict, total=False):
    """Every field of `JobRequest` but `model`, `prompt` and `messages`."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: str | list[str] | None
    stop_token_ids: list[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    n: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float] | None
    bad_words: list[str]
    allowed_token_ids: list[int] | None
    logprobs: int | None
    prompt_logprobs: int | None
    response_format: ResponseFormat | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    adapter: str | None
    embed: bool
    stream: bool
    priority: Priority | Literal["high", "normal", "low"]
    deadline: datetime | None
    ttl_s: float | None
    idempotency_key: str | None
    tenant: str
    metadata: dict[str, str]
    max_attempts: int
    traceparent: str | None


def new_request(model: str, prompt: Prompt | None, messages: Messages | None, params: JobParams) -> JobRequest:
    """A validated request; raises BadRequest."""
    fields: dict[str, Any] = {"model": model, **params}
    if prompt is not None:
        fields["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
    if messages is not None:
        fields["messages"] = [m if isinstance(m, Message) else dict(m) for m in messages]
    return job_request(fields)
