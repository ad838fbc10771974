"""What a request's parameters must be for a model to run it: one function for the HTTP door and for the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from text.grammar import AsksForGrammar, GrammarError, grammar_of
from text.limits import PromptRefused, check_ids, most_tokens

MOST_REPORTED = 65_536
"""Logprobs that one request may ask for, over all its tokens and completions: a result of about 6 MiB."""


class Asked(AsksForGrammar, Protocol):
    """The parameters that depend on the model: fields of the job contract and of the engine's own."""

    @property
    def max_tokens(self) -> int: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def ignore_eos(self) -> bool: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...
    @property
    def logit_bias(self) -> Mapping[int, float] | None: ...
    @property
    def allowed_token_ids(self) -> Sequence[int] | None: ...
    @property
    def logprobs(self) -> int | None: ...
    @property
    def prompt_logprobs(self) -> int | None: ...


def check_parameters(
    asked: Asked, *, prompt_tokens: int, max_seq_len: int, vocab_size: int, eos_token_ids: Collection[int]
) -> None:
    """Raise `PromptRefused` for parameters that a model with these numbers can't fulfil."""
    check_ids("stop_token_ids", asked.stop_token_ids, vocab_size)
    check_ids("logit_bias", asked.logit_bias or (), vocab_size)
    check_ids("allowed_token_ids", asked.allowed_token_ids or (), vocab_size)
    ends = {*asked.stop_token_ids, *(() if asked.ignore_eos else eos_token_ids)}
    if asked.min_tokens and asked.allowed_token_ids is not None and ends.issuperset(asked.allowed_token_ids):
        raise PromptRefused(
            "invalid_request",
            f"min_tokens={asked.min_tokens} can't be reached: every allowed token ends the text",
            "allowed_token_ids",
        )
    _check_reported(asked, prompt_tokens, most_tokens(prompt_tokens, asked.max_tokens, max_seq_len))
    try:
        grammar = grammar_of(asked)
        if grammar is not None:
            grammar.check()
    except GrammarError as error:
        raise PromptRefused("invalid_request", f"{error.param}: {error}", error.param) from error


def _check_reported(asked: Asked, prompt_tokens: int, output_tokens: int) -> None:
    reported = 0
    if asked.logprobs is not None:
        reported += asked.n * output_tokens * (1 + asked.logprobs)
    if asked.prompt_logprobs is not None:
        reported += prompt_tokens * (1 + asked.prompt_logprobs)
    if reported > MOST_REPORTED:
        raise PromptRefused(
            "invalid_request",
            f"{reported} logprobs may have to be reported, and at most {MOST_REPORTED} can be: ask for fewer tokens,"
            " completions or alternatives",
            "logprobs" if asked.logprobs is not None else "prompt_logprobs",
        )
