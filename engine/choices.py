"""The completions of one request, and its one output."""

from __future__ import annotations

from collections.abc import Sequence

from engine.generation import Generation
from engine.request import EngineRequest, FinishReason, RequestMetrics, RequestOutput


class Choices:
    """A request between its arrival and its output: `n` generations that run each for itself and end as one.

    An error or an abort of one of them is the request's; the others keep what they have.
    """

    def __init__(self, request: EngineRequest, generations: Sequence[Generation], arrived_s: float) -> None:
        self.id = request.id
        self.generations = generations
        self.arrived_s = arrived_s
        self.admitted_s: float | None = None
        self.error: str | None = None
        self.error_code: str | None = None
        self._scored = request.params.prompt_logprobs is not None

    @property
    def live(self) -> list[Generation]:
        """Those that have not ended."""
        return [generation for generation in self.generations if generation.finish_reason is None]

    def blame(self, error: str | None, code: str | None) -> None:
        """Note why one of them failed or was stopped; the first cause stays."""
        self.error = self.error or error
        self.error_code = self.error_code or code

    def output(self, now_s: float) -> RequestOutput:
        """The finished request."""
        choices = tuple(generation.choice() for generation in self.generations)
        reasons = [choice.finish_reason for choice in choices]
        first, sequence = choices[0], self.generations[0].sequence
        graver = [reason for reason in (FinishReason.ERROR, FinishReason.ABORT) if reason in reasons]
        return RequestOutput(
            request_id=self.id,
            prompt_token_ids=tuple(sequence.tokens[: sequence.prompt_tokens]),
            token_ids=first.token_ids,
            text=first.text,
            finish_reason=graver[0] if graver else first.finish_reason,
            stop_reason=first.stop_reason,
            metrics=self._metrics(now_s),
            error=self.error,
            error_code=self.error_code,
            logprobs=first.logprobs,
            prompt_logprobs=(None, *self.generations[0].prompt_logprobs) if self._scored else None,
            embedding=self.generations[0].embedding(),
            choices=choices,
        )

    def _metrics(self, now_s: float) -> RequestMetrics:
        generations = self.generations
        firsts = [g.first_token_s for g in generations if g.first_token_s is not None]
        lasts = [g.last_token_s for g in generations if g.last_token_s is not None]
        steps = sum(g.steps for g in generations)
        return RequestMetrics(
            arrived_s=self.arrived_s,
            admitted_s=self.admitted_s,
            first_token_s=min(firsts, default=None),
            last_token_s=max(lasts, default=None),
            finished_s=now_s,
            cached_tokens=generations[0].sequence.cached_tokens,
            preemptions=sum(g.sequence.preemptions for g in generations),
            mean_batch_size=sum(g.batch_size_sum for g in generations) / steps if steps else None,
            max_batch_size=max(g.batch_size_max for g in generations) or None,
        )
