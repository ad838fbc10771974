"""The requests in the engine, from their entering to their output: who is live, how each ends, what is to be told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from engine.choices import Choices
from engine.counters import Counters
from engine.deadlines import Deadlines
from engine.generation import Generation
from engine.reports import Reports
from engine.request import FinishReason
from engine.scheduler import Scheduler
from engine.sequence import TokenSequence
from kernels.sampling import TokenLogprobs

log = logging.getLogger(__name__)

ENGINE_ERROR = "engine_error"
"""`RequestOutput.error_code` of a request that failed while it ran."""
DEADLINE_EXCEEDED = "deadline_exceeded"
"""`RequestOutput.error_code` of a request whose deadline passed."""


class Roster:
    """Enters requests into the scheduler, and takes them out of it when they end, whatever their cause."""

    def __init__(self, scheduler: Scheduler, counters: Counters, clock: Callable[[], float]) -> None:
        self.live: dict[str, Generation] = {}
        """Completions that run or wait, by the ids of their sequences."""
        self.reports = Reports(counters, clock)
        self._scheduler = scheduler
        self._counters = counters
        self._clock = clock
        self._requests: dict[str, Choices] = {}
        self._deadlines = Deadlines()
        self._failed: list[str] = []
        """Requests of which one completion has failed, and others are live."""
        self._arrivals = 0

    def enter(self, choices: Choices) -> None:
        """Take a prepared request."""
        if choices.id in self._requests:
            raise ValueError(f"request {choices.id} is in the engine already")
        self._requests[choices.id] = choices
        for generation in choices.generations:
            sequence = generation.sequence
            self._arrivals += 1
            sequence.arrival = self._arrivals
            self.reports.add(generation.repeated)
            if generation.finish_reason is not None:
                continue  # its progress was all of it
            if sequence.needs_nothing:
                self.end(generation, FinishReason.LENGTH)
            else:
                self._scheduler.add(sequence, self._clock())
                self.live[generation.id] = generation
                if sequence.deadline_s is not None:
                    self._deadlines.add(generation.id, sequence.deadline_s)
        if choices.id in self._requests and not choices.live:
            self._close(choices)

    def admit(self, sequences: Iterable[TokenSequence], now_s: float) -> tuple[tuple[str, float], ...]:
        """Note that these begin to run; the requests that do so for the first time, and when."""
        first = []
        for sequence in sequences:
            choices = self._requests[self.live[sequence.id].request_id]
            if choices.admitted_s is None:
                choices.admitted_s = now_s
                self._counters.prompt_tokens += sequence.prompt_tokens
                self._counters.cached_tokens += sequence.cached_tokens
                first.append((choices.id, now_s))
        return tuple(first)

    def take(self, generation: Generation, chosen: Sequence[int], now_s: float, report: TokenLogprobs | None) -> None:
        """Add the token that was chosen, and those chosen after drafts that it confirms one after the other.

        If one has no text, because the tokenizer fails, its request does, with the tokens before it.
        """
        sequence = generation.sequence
        known, drafts = len(sequence.tokens), sequence.drafts
        for place, token in enumerate(chosen):
            try:
                self.reports.add(generation.append(token, now_s, report))
            except Exception as error:
                del sequence.tokens[known + place :]
                self.fail(sequence, error)
                return
            if generation.finish_reason is not None or (place < len(drafts) and drafts[place] != token):
                break
        came = len(sequence.tokens) - known
        self._counters.generation_tokens += came
        if sequence.lookup is not None:
            self._counters.drafted_tokens += len(chosen) - 1
            self._counters.accepted_tokens += came - 1
            sequence.lookup.judge(sequence.tokens[known:])
        if generation.finish_reason is not None:
            self._retire(generation, generation.error, ENGINE_ERROR if generation.error else None)
        elif came > 1:
            self._scheduler.accept(sequence, came - 1)

    def end(
        self, generation: Generation, reason: FinishReason, error: str | None = None, code: str | None = None
    ) -> None:
        """End a completion for a reason that is not its own last token."""
        self.reports.add(generation.end(reason))
        self._retire(generation, error, code)

    def score(self, generation: Generation, found: Sequence[TokenLogprobs]) -> bool:
        """Add logprobs of the prompt; False if the request has failed because the tokenizer has."""
        try:
            generation.score(found)
        except Exception as error:
            self.fail(generation.sequence, error)
            return False
        return True

    def fail(self, sequence: TokenSequence, error: Exception) -> None:
        """End a completion that can't be computed, and by `abort_failed` the others of its request."""
        log.error("request %s failed", sequence.id, exc_info=error)
        self.end(self.live[sequence.id], FinishReason.ERROR, f"{type(error).__name__}: {error}", ENGINE_ERROR)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its pages. Unknown ids are ignored."""
        choices = self._requests.get(request_id)
        for generation in choices.live if choices is not None else ():
            self.end(generation, FinishReason.ABORT)

    def abort_all(self) -> None:
        for request_id in tuple(self._requests):
            self.abort(request_id)

    def abort_failed(self) -> None:
        """Drop the other completions of requests of which one has failed."""
        while self._failed:
            self.abort(self._failed.pop())

    @property
    def next_deadline_s(self) -> float | None:
        return self._deadlines.next_s

    def expire(self, now_s: float) -> None:
        """Drop whoever isn't wanted any more."""
        for sequence_id in self._deadlines.passed(now_s):
            self.end(self.live[sequence_id], FinishReason.ABORT, code=DEADLINE_EXCEEDED)

    def abandon(self, error: str, scheduler: Scheduler) -> None:
        """Fail every request without touching its scheduler, and go on with another one."""
        for choices in self._requests.values():
            for generation in choices.live:
                self.reports.add(generation.end(FinishReason.ERROR))
            choices.blame(error, ENGINE_ERROR)
            self.reports.finish(choices.output(self._clock()))
        self._requests.clear()
        self.live.clear()
        self._failed.clear()
        self._deadlines.clear()
        self._scheduler = scheduler

    def check(self) -> None:
        """Raise AssertionError if the scheduler has others than this, or a request has lost a completion."""
        scheduled = {*(s.id for s in self._scheduler.running), *(s.id for s in self._scheduler.waiting)}
        assert scheduled == set(self.live), "the scheduler and the engine know different requests"
        live = {generation.id for choices in self._requests.values() for generation in choices.live}
        assert live == set(self.live), "a request has lost one of its completions"

    def _retire(self, generation: Generation, error: str | None = None, code: str | None = None) -> None:
        if self.live.pop(generation.id, None) is not None:
            self._deadlines.discard(generation.id)
            self._scheduler.remove(generation.sequence)
        choices = self._requests[generation.request_id]
        choices.blame(error, code)
        if not choices.live:
            self._close(choices)
        elif error is not None:
            self._failed.append(choices.id)

    def _close(self, choices: Choices) -> None:
        del self._requests[choices.id]
        self.reports.finish(choices.output(self._clock()))
