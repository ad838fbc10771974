"""What may come next in a sequence, and how likely it is made: everything but its own sampling. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from engine.grammar import Mask, Matcher, bits
from engine.params import SamplingParams
from kernels.sampling import Adjustment


class TokenRules:
    """Penalties, bias, bad words, allowed tokens and grammar of one sequence.

    Where they leave no token between them, the stronger holds: the grammar, then the allowed tokens,
    then the bans on ends of text before `min_tokens`, then the bad words.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        bad_words: Sequence[Sequence[int]] = (),
        matcher: Matcher | None = None,
    ) -> None:
        self.matcher = matcher
        self._vocab_size = vocab_size
        self._penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._penalised = self._penalties != (1.0, 0.0, 0.0)
        self._bias = tuple((params.logit_bias or {}).items())
        self._allowed = None if params.allowed_token_ids is None else bits(params.allowed_token_ids, vocab_size)
        self._bad_words = bad_words

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        vocab_size: int,
        bad_words: Sequence[Sequence[int]] = (),
        matcher: Matcher | None = None,
    ) -> TokenRules | None:
        """The rules of a request, or None for one that has none: it costs nothing."""
        rules = cls(params, vocab_size, bad_words, matcher)
        plain = not rules._penalised and not rules._bias and rules._allowed is None
        return None if plain and not bad_words and matcher is None else rules

    def apply(
        self, tokens: Sequence[int], prompt_tokens: int, ends: tuple[int, ...], mask: Mask | None
    ) -> tuple[Adjustment | None, tuple[int, ...]]:
        """The adjustment and the bans of the next token, after `tokens`.

        `ends` may not come yet; `mask` has the bits of the tokens that the grammar allows, if there is one.
        """
        words = self._completing(tokens, prompt_tokens)
        allowed = _narrowed(mask, self._allowed)
        if allowed is None:
            banned = (*ends, *words)
            if len(banned) >= self._vocab_size and len(set(banned)) == self._vocab_size:
                banned = ends
            return self._adjustment(tokens, prompt_tokens, None), banned
        for weaker in (ends, words):
            if weaker:
                allowed = _narrowed(allowed, ~bits(weaker, self._vocab_size))
        return self._adjustment(tokens, prompt_tokens, allowed), ()

    def _adjustment(self, tokens: Sequence[int], prompt_tokens: int, allowed: Mask | None) -> Adjustment | None:
        if not self._penalised and not self._bias and allowed is None:
            return None
        repetition, frequency, presence = self._penalties
        return Adjustment(
            tokens=tokens if self._penalised else (),
            prompt_tokens=prompt_tokens,
            repetition=repetition,
            frequency=frequency,
            presence=presence,
            bias=self._bias,
            allowed=None if allowed is None else allowed.tobytes(),
        )

    def _completing(self, tokens: Sequence[int], prompt_tokens: int) -> list[int]:
        """Tokens that would complete a bad word: its other tokens have just been generated."""
        produced = len(tokens) - prompt_tokens
        found = []
        for word in self._bad_words:
            before = len(word) - 1
            if before <= produced and list(tokens[len(tokens) - before :]) == list(word[:before]):
                found.append(word[before])
        return found


def _narrowed(mask: Mask | None, by: Mask | None) -> Mask | None:
    """What both masks allow, or the first alone if that is nothing."""
    if mask is None or by is None:
        return by if mask is None else mask
    both = mask & by
    return both if both.any() else mask
