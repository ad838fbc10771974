"""What a prompt must be for a model to run it: one function for the HTTP door and for the engine."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence

from text.chat import TemplateError
from text.tokenizer import Tokenizer


class PromptRefused(ValueError):
    """The prompt can't run on this model. `code` is a reason of the job contract, `param` the field at fault."""

    def __init__(self, code: str, message: str, param: str) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def check_adapter(adapter: str | None, known: Collection[str]) -> None:
    """Raise `PromptRefused` for an adapter that the model isn't served with."""
    if adapter is not None and adapter not in known:
        there = f"it has {', '.join(known)}" if known else "it is served without any"
        raise PromptRefused("invalid_request", f"the model has no adapter {adapter!r}: {there}", "adapter")


def check_prompt(
    tokenizer: Tokenizer,
    *,
    prompt: str | Sequence[int] | None = None,
    messages: Sequence[Mapping[str, str]] | None = None,
    max_tokens: int,
    max_seq_len: int,
    whole: bool = False,
) -> list[int]:
    """The prompt's token ids, or `PromptRefused`.

    A prompt as long as the context leaves no room for a token, so it is refused unless `max_tokens`
    is 0; one token less leaves room for exactly one. `max_tokens` is not refused for going past the
    context: see `most_tokens`. `whole`: the text is all that there will be, so the tokenizer ends it too.
    """
    if (prompt is None) == (messages is None):
        raise PromptRefused("invalid_request", "give exactly one of 'prompt' and 'messages'", "prompt")
    param = "prompt" if messages is None else "messages"
    token_ids = _encode(tokenizer, prompt, messages, param, whole)
    if not token_ids:
        raise PromptRefused("invalid_request", "the prompt is empty", param)
    check_ids(param, token_ids, tokenizer.vocab_size)
    count = len(token_ids)
    if count > max_seq_len or (count == max_seq_len and max_tokens > 0):
        raise PromptRefused(
            "context_length_exceeded",
            f"the prompt has {count} tokens; it and its output must fit into a context of {max_seq_len}",
            param,
        )
    return token_ids


def most_tokens(prompt_tokens: int, max_tokens: int, max_seq_len: int) -> int:
    """How many tokens an accepted prompt may get: `max_tokens`, cut to what the context has left."""
    return min(max_tokens, max_seq_len - prompt_tokens)


def _encode(
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | None,
    messages: Sequence[Mapping[str, str]] | None,
    param: str,
    whole: bool,
) -> list[int]:
    if prompt is not None and not isinstance(prompt, str):
        try:
            return list(map(operator.index, prompt))
        except TypeError as error:
            raise PromptRefused("invalid_request", "the prompt must be text or token ids", param) from error
    if not all(isinstance(message, Mapping) and all(map(_is_str, message.values())) for message in messages or ()):
        raise PromptRefused("invalid_request", "every message must be an object whose values are texts", param)
    try:
        if prompt is not None:
            prompt.encode()
            encode = tokenizer.encode_whole if whole else tokenizer.encode_prompt
            return encode(prompt) if prompt else []
        for message in messages or ():
            for value in message.values():
                value.encode()
        return tokenizer.encode_chat(messages or ())
    except TemplateError as error:
        raise PromptRefused("template_error", str(error), param) from error
    except UnicodeEncodeError as error:
        raise PromptRefused("invalid_request", f"the text is not valid Unicode: {error.reason}", param) from error


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def check_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raise `PromptRefused` for an id that is none of the vocabulary's, with both numbers."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise PromptRefused(
                "invalid_request", f"{param}: token id {token_id} is outside the vocabulary of {vocab_size}", param
            )
