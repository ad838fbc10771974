"""A request's output as it grows: text, the reason for its end, and where its time went."""

from __future__ import annotations

from engine.request import EngineRequest, FinishReason, RequestMetrics, RequestOutput, TokenDelta
from engine.sequence import TokenSequence
from text.detokenizer import Detokenizer
from text.stop import StopMatcher
from text.tokenizer import Tokenizer


class Generation:
    """One request between its arrival and its output. The engine alone changes it."""

    def __init__(self, request: EngineRequest, sequence: TokenSequence, tokenizer: Tokenizer, arrived_s: float) -> None:
        params = request.params
        self.id = request.id
        self.sequence = sequence
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.admitted_s: float | None = None
        self._params = params
        self._end_ids = frozenset(sequence.end_ids)
        self._detokenizer = Detokenizer(tokenizer, sequence.tokens)
        self._stops = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._texts: list[str] = []
        self._chars = 0
        self.arrived_s = arrived_s
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._steps = 0
        self._batch_size_sum = 0
        self._batch_size_max = 0

    def count_step(self, batch_size: int) -> None:
        """Note that the request took part in a step of `batch_size` sequences."""
        self._steps += 1
        self._batch_size_sum += batch_size
        self._batch_size_max = max(self._batch_size_max, batch_size)

    def append(self, token_id: int, now_s: float) -> TokenDelta:
        """Take a new token; sets `finish_reason` if it is the last one."""
        if self._first_token_s is None:
            self._first_token_s = now_s
        self._last_token_s = now_s
        tokens = self.sequence.tokens
        armed = len(tokens) >= self.sequence.ends_from
        tokens.append(token_id)
        if armed and token_id in self._end_ids:
            return self._delta(self._end_by_token(token_id), (token_id,))
        text, stop = self._stops.push(self._detokenizer.push(token_id), armed)
        if stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        elif len(tokens) == self.sequence.max_len:
            self.finish_reason = FinishReason.LENGTH
            text += self._flush()
        return self._delta(text, (token_id,))

    def end(self, reason: FinishReason) -> TokenDelta | None:
        """End it from outside; what was held back until now belongs to its text."""
        self.finish_reason = reason
        text = self._flush()
        return self._delta(text, ()) if text else None

    def output(self, now_s: float, error: str | None = None, error_code: str | None = None) -> RequestOutput:
        """The finished request."""
        assert self.finish_reason is not None
        sequence = self.sequence
        return RequestOutput(
            request_id=self.id,
            prompt_token_ids=tuple(sequence.tokens[: sequence.prompt_tokens]),
            token_ids=tuple(sequence.tokens[sequence.prompt_tokens :]),
            text="".join(self._texts),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            metrics=RequestMetrics(
                arrived_s=self.arrived_s,
                admitted_s=self.admitted_s,
                first_token_s=self._first_token_s,
                last_token_s=self._last_token_s,
                finished_s=now_s,
                cached_tokens=sequence.cached_tokens,
                preemptions=sequence.preemptions,
                mean_batch_size=self._batch_size_sum / self._steps if self._steps else None,
                max_batch_size=self._batch_size_max or None,
            ),
            error=error,
            error_code=error_code,
        )

    def _end_by_token(self, token_id: int) -> str:
        self.finish_reason = FinishReason.STOP
        if token_id not in self._params.stop_token_ids:
            return self._flush()
        self.stop_reason = token_id
        if not self._params.include_stop_str_in_output:
            return self._flush()
        shown = self._detokenizer.push(token_id)
        return self._stops.flush() + shown + self._detokenizer.flush()

    def _flush(self) -> str:
        return self._stops.flush() + self._detokenizer.flush()

    def _delta(self, text: str, token_ids: tuple[int, ...]) -> TokenDelta:
        delta = TokenDelta(self.id, text, self._chars, token_ids)
        if text:
            self._texts.append(text)
            self._chars += len(text)
        return delta
