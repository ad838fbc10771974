"""What a job generated."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "abort"]


class Usage(BaseModel):
    """Token counts, under OpenAI's names."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Of all completions together."""
    total_tokens: int = 0
    cached_tokens: int = 0


class TopLogprob(BaseModel):
    """A token that might have come, and how likely it was: the raw log-softmax, at least -9999."""

    token: str
    """Its text, with U+FFFD where its bytes are no whole character; the name of a special one."""
    token_id: int
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that came. `rank` is 1 for the likeliest; `top` are the likeliest, it may be one of them or not."""

    rank: int
    top: list[TopLogprob] = []


class Choice(BaseModel):
    """One of a job's completions."""

    index: int
    text: str
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None


class JobResult(BaseModel):
    """What was generated. A job that was stopped early keeps the part that it had."""

    text: str
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token id that ended the text; None for the model's own end or a length."""
    usage: Usage = Usage()
    logprobs: list[TokenLogprob] | None = None
    """One for each of `token_ids`, if they were asked for. With `n` over 1 they are those of each choice."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One for each token of the prompt, null for the first, if they were asked for."""
    embedding: list[float] | None = None
    """The vector, if one was asked for and all of the text was computed."""
    choices: list[Choice] = []
    """With `n` over 1: every completion in order. Text and tokens above are the first one's."""
