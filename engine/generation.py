"""One completion as it grows: text, the reason for its end, its logprobs, and where its time went."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.grammar import GrammarFailed
from engine.params import SamplingParams
from engine.reporting import shown
from engine.request import Choice, FinishReason, Progress, TokenDelta, TokenLogprob
from engine.sequence import TokenSequence
from kernels.sampling import TokenLogprobs
from text.detokenizer import Detokenizer
from text.stop import StopMatcher
from text.tokenizer import Tokenizer


class ProgressUnusable(ValueError):
    """What a completion is said to have produced can't be what this model produced for this request."""


class Generation:
    """One of a request's completions between its arrival and its end. The engine alone changes it."""

    def __init__(
        self, request_id: str, index: int, params: SamplingParams, sequence: TokenSequence, tokenizer: Tokenizer
    ) -> None:
        self.id = sequence.id
        self.request_id = request_id
        self.index = index
        self.sequence = sequence
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        """What went wrong, for a completion that failed by its own last token."""
        self.prompt_logprobs: list[TokenLogprob] = []
        """Of the prompt's second token and those after it, as far as they are computed."""
        self.repeated: TokenDelta | None = None
        """Tells of the tokens that it had elsewhere, once it enters."""
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.steps = 0
        self.batch_size_sum = 0
        self.batch_size_max = 0
        self._params = params
        self._matcher = sequence.rules.matcher if sequence.rules is not None else None
        self._end_ids = frozenset(sequence.end_ids)
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, sequence.tokens)
        self._stops = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._texts: list[str] = []
        self._chars = 0
        self._logprobs: list[TokenLogprob] = []
        self._pooled: NDArray[np.float32] | None = None

    def count_step(self, batch_size: int) -> None:
        """Note that it took part in a step of `batch_size` sequences."""
        self.steps += 1
        self.batch_size_sum += batch_size
        self.batch_size_max = max(self.batch_size_max, batch_size)

    def score(self, found: Sequence[TokenLogprobs]) -> None:
        """Take the logprobs of the next tokens of the prompt."""
        self.prompt_logprobs += [shown(self._tokenizer, one) for one in found]
        self.sequence.scored += len(found)

    def pool(self, sums: NDArray[np.float32], until: int) -> None:
        """Take the sum of the last hidden states of the tokens that count, up to token `until`."""
        self._pooled = sums if self._pooled is None else self._pooled + sums
        self.sequence.pooled = until

    def embedding(self) -> tuple[float, ...] | None:
        """The vector that was asked for, once all of the text is in it."""
        pooling = self.sequence.pooling
        if pooling is None or self._pooled is None or self.finish_reason is not FinishReason.LENGTH:
            return None
        return pooling.finish(self._pooled, self.sequence.prompt_tokens)

    def append(self, token_id: int, now_s: float, found: TokenLogprobs | None = None) -> TokenDelta:
        """Take a new token; sets `finish_reason` if it is the last one."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        if found is None:
            return self._delta(self._take(token_id), (token_id,))
        told = shown(self._tokenizer, found)
        text = self._take(token_id)
        self._logprobs.append(told)
        return self._delta(text, (token_id,), (told,))

    def replay(self, progress: Progress) -> None:
        """Take the tokens that it had elsewhere, before it enters; `repeated` tells of them. May end it.

        Raises `ProgressUnusable`, after which it is of no use.
        """
        tokens, scores = progress.token_ids, progress.logprobs
        if len(scores) != (len(tokens) if self._params.logprobs is not None else 0):
            raise ProgressUnusable(f"{len(scores)} logprobs for {len(tokens)} tokens")
        texts = []
        for token_id in tokens:
            if self.finish_reason is not None:
                raise ProgressUnusable("tokens come after the last one")
            if not 0 <= token_id < self._tokenizer.vocab_size or len(self.sequence.tokens) >= self.sequence.max_len:
                raise ProgressUnusable(f"token {token_id} has no place in it")
            texts.append(self._take(token_id))
            if self.error is not None:
                raise ProgressUnusable(self.error)
        self._logprobs += scores
        if tokens:
            self.repeated = self._delta("".join(texts), tokens, scores)

    def _take(self, token_id: int) -> str:
        """Add a token, and give the text that it brings; sets `finish_reason` if it is the last one."""
        tokens = self.sequence.tokens
        armed = len(tokens) >= self.sequence.ends_from
        tokens.append(token_id)
        if token_id in self._end_ids and (armed if self._matcher is None else self._matcher.complete):
            return self._end_by_token(token_id)
        if self._matcher is not None:
            try:
                self._matcher.accept(token_id)
            except GrammarFailed as error:
                self.finish_reason, self.error = FinishReason.ERROR, str(error)
                return self._flush()
        text, stop = self._stops.push(self._detokenizer.push(token_id), armed, self._parses if self._matcher else None)
        if stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        elif self._matcher is not None and self._matcher.finished:
            self.finish_reason = FinishReason.STOP
            text += self._flush()
        elif len(tokens) == self.sequence.max_len:
            self.finish_reason = FinishReason.LENGTH
            text += self._flush()
        return text

    def end(self, reason: FinishReason) -> TokenDelta | None:
        """End it from outside; what was held back until now belongs to its text."""
        self.finish_reason = reason
        text = self._flush()
        return self._delta(text, ()) if text else None

    def choice(self) -> Choice:
        """The finished completion."""
        assert self.finish_reason is not None
        return Choice(
            index=self.index,
            token_ids=tuple(self.sequence.tokens[self.sequence.prompt_tokens :]),
            text="".join(self._texts),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self._logprobs) if self._params.logprobs is not None else None,
        )

    def _parses(self, kept: str) -> bool:
        """Whether the text follows the grammar if it ends with `kept`."""
        return self._matcher is None or self._matcher.parses("".join(self._texts) + kept)

    def _end_by_token(self, token_id: int) -> str:
        self.finish_reason = FinishReason.STOP
        if token_id not in self._params.stop_token_ids:
            return self._flush()
        self.stop_reason = token_id
        if not self._params.include_stop_str_in_output or self._matcher is not None:
            return self._flush()
        text = self._detokenizer.push(token_id)
        return self._stops.flush() + text + self._detokenizer.flush()

    def _flush(self) -> str:
        return self._stops.flush() + self._detokenizer.flush()

    def _delta(self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] = ()) -> TokenDelta:
        """What is told of tokens that have just been added, and of text."""
        position = len(self.sequence.tokens) - self.sequence.prompt_tokens - len(token_ids)
        delta = TokenDelta(self.request_id, text, self._chars, token_ids, self.index, position, logprobs)
        if text:
            self._texts.append(text)
            self._chars += len(text)
        return delta
