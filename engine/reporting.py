"""Logprobs in the form that people read: with the tokens' texts, and numbers that JSON can hold."""

from __future__ import annotations

from engine.request import TokenLogprob, TopLogprob
from kernels.sampling import TokenLogprobs
from text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for everything below it, and for what is no number."""


def shown(tokenizer: Tokenizer, found: TokenLogprobs) -> TokenLogprob:
    """What a step reported of one row."""
    text = tokenizer.show(found.token)
    top = tuple([_top(tokenizer, token_id, logprob) for token_id, logprob in found.top])
    return TokenLogprob(found.token, text.text, text.data, _bounded(found.logprob), found.rank, top)


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    text = tokenizer.show(token_id)
    return TopLogprob(token_id, text.text, text.data, _bounded(logprob))


def _bounded(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
