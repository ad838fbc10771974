"""The engine: requests in, one step at a time, outputs out. Usable without a thread, a queue or a database."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from engine.batch import Model
from engine.choices import Choices
from engine.config import EngineConfig
from engine.contract import EngineStats
from engine.counters import Counters
from engine.deadlines import Deadlines
from engine.drafted import DraftedModel
from engine.executor import Executed, Executor, Failed, OutOfMemory, Steps
from engine.generation import Generation
from engine.launching import launching
from engine.memory import PagePool
from engine.pipeline import Pipeline
from engine.preparation import Preparation
from engine.reports import Reports, StepResult
from engine.request import EngineRequest, FinishReason, RequestOutput, RequestRefused
from engine.residence import Residence
from engine.scheduler import Chunk, Plan, Scheduler
from kernels.sampling import Sampled, TokenLogprobs
from text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ENGINE_ERROR = "engine_error"
"""`RequestOutput.error_code` of a request that failed while it ran."""
DEADLINE_EXCEEDED = "deadline_exceeded"
"""`RequestOutput.error_code` of a request whose deadline passed."""
MOST_THINNED_SLOTS = 16384
"""Tokens of requests that are thinned between two steps; one request is, however long it is."""
TIDY_EVERY = 64
"""Steps after which a busy engine moves a few pages together, or gives memory back."""


class Engine:
    """Schedules requests over one model and commits what it returns.

    Not thread-safe, but for `prepare`. Endings, whatever their cause, are reported by the next `step`;
    their pages are free before that. `clock` gives seconds, as `time.monotonic` does.
    """

    def __init__(self, model: Model, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._drafter = model.drafter if isinstance(model, DraftedModel) else None
        launcher = launching(model, config.overlap)
        model = launcher or model
        self._model = model
        self._config = config
        self._clock = clock
        self._tokenizer = Tokenizer(model.info.text)
        self._memory = Residence(model, config)
        self.max_seq_len = self._memory.max_seq_len
        """Most tokens of prompt and output: the model's limit or the configured one."""
        self._scheduler = self._new_scheduler(self._memory.pool)
        self._preparation = Preparation(self._tokenizer, model.info, config)
        self._steps: Steps = Executor(model, config.page_size)
        if launcher is not None:
            guesses = bool(self._scheduler.speculation)
            self._steps = Pipeline(launcher, config.page_size, guesses=guesses)
        self._began_s = self._clock()
        self._deadlines = Deadlines()
        self._requests: dict[str, Choices] = {}
        self._live: dict[str, Generation] = {}
        self._failed: list[str] = []
        self._arrivals = 0
        self._counters = Counters(last_step_s=self._clock())
        self._reports = Reports(self._counters, clock)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def add(self, request: EngineRequest) -> None:
        """Take a request, or raise `RequestRefused`."""
        self.enter(self.prepare(request, self._clock()))

    def prepare(self, request: EngineRequest, arrived_s: float) -> Choices:
        """Tokenise a request and check it against the model's limits. Touches no state: any thread may call it."""
        return self._preparation.prepare(request, arrived_s, self.max_seq_len)

    def enter(self, choices: Choices) -> None:
        """Take a prepared request."""
        if choices.id in self._requests:
            raise ValueError(f"request {choices.id} is in the engine already")
        self._requests[choices.id] = choices
        for generation in choices.generations:
            sequence = generation.sequence
            self._arrivals += 1
            sequence.arrival = self._arrivals
            self._reports.add(generation.repeated)
            if generation.finish_reason is not None:
                continue  # its progress was all of it
            if sequence.needs_nothing:
                self._end(generation, FinishReason.LENGTH)
            else:
                self._scheduler.add(sequence, self._clock())
                self._live[generation.id] = generation
                if sequence.deadline_s is not None:
                    self._deadlines.add(generation.id, sequence.deadline_s)
        if choices.id in self._requests and not choices.live:
            self._close(choices)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its pages; the next step reports it. Unknown ids are ignored."""
        choices = self._requests.get(request_id)
        for generation in choices.live if choices is not None else ():
            self._end(generation, FinishReason.ABORT)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        scheduler = self._scheduler
        waiting = len(scheduler.waiting) > 0 and scheduler.admission.max_num_seqs > 0
        runs = not self._memory.asleep and (len(scheduler.running) or waiting or self._steps.busy)
        next_s = self._deadlines.next_s
        return bool(runs or self._reports.ended or (next_s is not None and next_s <= self._clock()))

    def rest_s(self) -> float | None:
        """Seconds until a deadline passes or there may be something to `tidy`; None if neither will be."""
        moments = [at_s for at_s in (self._deadlines.next_s, self._memory.release_s) if at_s is not None]
        return max(0.0, min(moments) - self._clock()) if moments else None

    def step(self) -> StepResult:
        """Compute the next tokens of whoever is to run, and report everything since the last step.

        With steps that run behind the host's back it begins the next, and reports what the one before brought.
        Raises `ModelFailed` if the model is broken; see `abandon`.
        """
        now_s = self._clock()
        for request_id in self._deadlines.passed(now_s):
            self._end(self._live[request_id], FinishReason.ABORT, code=DEADLINE_EXCEEDED)
        if self._memory.asleep:
            return self.report()
        if self._steps.decides:
            self._advance((), now_s)
        self._thin()
        plan = self._scheduler.plan(now_s)
        admitted = self._note(plan, now_s)
        if plan.chunks or self._steps.busy:
            self._advance(plan.chunks, now_s)
        return self.report(admitted)

    def report(self, admitted: tuple[tuple[str, float], ...] = ()) -> StepResult:
        """What has not been reported yet, without computing anything."""
        return self._reports.take(admitted)

    def abort_all(self) -> None:
        """Drop every request, as `abort` does."""
        for request_id in tuple(self._requests):
            self.abort(request_id)

    def abandon(self, error: str) -> StepResult:
        """Fail every request without touching the scheduler; for a host that gives the engine up after a fault."""
        for choices in self._requests.values():
            for generation in choices.live:
                self._conclude(generation, FinishReason.ERROR)
            choices.blame(error, ENGINE_ERROR)
            self._record(choices)
        self._requests.clear()
        self._live.clear()
        self._failed.clear()
        self._deadlines.clear()
        self._steps.forget()
        cap = self._scheduler.admission.max_num_seqs
        self._memory.swap.clear()
        self._scheduler = self._new_scheduler(self._memory.fresh_pool())
        self._scheduler.admission.max_num_seqs = cap
        return self.report()

    def set_max_num_seqs(self, n: int) -> None:
        """Admission cap from now on; running requests are not touched."""
        self._scheduler.admission.max_num_seqs = n

    def set_kv_bytes(self, kv_bytes: int) -> None:
        """Change the size of the KV memory; requests for which there is no room any more make way.

        Raises `NoRoom` if one request of the context length wouldn't fit, or if there is not so much memory.
        """
        budget = self._memory.plan_size(kv_bytes)
        self._finish_steps()
        self._counters.preemptions += len(self._scheduler.make_room(budget.pages, self._clock()))
        self._memory.resize(budget)

    def sleep(self) -> None:
        """Give the memory of weights and KV back. Requests wait meanwhile, running ones as if they were preempted."""
        if not self._memory.asleep:
            self._finish_steps()
            self._counters.preemptions += len(self._scheduler.make_room(0, self._clock()))
            self._memory.sleep()

    def wake(self) -> None:
        """Load the weights again and go on. Raises and stays asleep if they can't be had."""
        if self._memory.asleep:
            self._memory.wake()

    @property
    def asleep(self) -> bool:
        return self._memory.asleep

    def tidy(self) -> bool:
        """Use an idle moment to give memory back; False if there is nothing left to do."""
        return self._memory.tidy(self._clock())

    def refuse(self, request: EngineRequest, refused: RequestRefused, arrived_s: float) -> RequestOutput:
        """The output of a request that can't run."""
        return self._reports.refused(request, refused, arrived_s)

    def aborted(self, request: EngineRequest, arrived_s: float) -> RequestOutput:
        """The output of a request that was dropped before it entered."""
        return self._reports.aborted(request, arrived_s)

    def stats(self) -> EngineStats:
        return self._counters.stats(self._scheduler)

    def check(self) -> None:
        """Raise AssertionError if an invariant of scheduler or memory is broken."""
        self._scheduler.check()
        self._memory.check()
        scheduled = {*(s.id for s in self._scheduler.running), *(s.id for s in self._scheduler.waiting)}
        assert scheduled == set(self._live), "the scheduler and the engine know different requests"
        live = {generation.id for choices in self._requests.values() for generation in choices.live}
        assert live == set(self._live), "a request has lost one of its completions"

    def close(self) -> None:
        """Release the model. The engine is of no use afterwards."""
        self._model.close()

    def _new_scheduler(self, pool: PagePool) -> Scheduler:
        model = self._model
        reach_tokens = model.info.reach_tokens
        return Scheduler(pool, self._config, self._memory.swap, model.cheap_rows, reach_tokens, self._drafter)

    def _note(self, plan: Plan, now_s: float) -> tuple[tuple[str, float], ...]:
        """Count a plan's admissions and preemptions; the first admissions are reported."""
        first = []
        for sequence in plan.admitted:
            generation = self._live[sequence.id]
            choices = self._requests[generation.request_id]
            if choices.admitted_s is None:
                choices.admitted_s = now_s
                self._counters.prompt_tokens += sequence.prompt_tokens
                self._counters.cached_tokens += sequence.cached_tokens
                first.append((choices.id, now_s))
        self._counters.preemptions += len(plan.preempted)
        return tuple(first)

    def _finish_steps(self) -> None:
        """Let nothing be under way any more."""
        if self._steps.busy:
            self._advance((), self._clock())

    def _advance(self, chunks: Sequence[Chunk], now_s: float) -> None:
        """Run steps, and note those that are over."""
        busy, began_s = self._steps.busy, self._began_s
        tokens = self._run(chunks)
        self._began_s = now_s
        if busy or not self._steps.busy:
            counters = self._counters
            began_s = max(began_s, counters.last_step_s) if busy else now_s
            counters.steps += 1
            counters.last_step_s = self._clock()
            if counters.steps % TIDY_EVERY == 0:
                self._memory.tidy(now_s)
            self._scheduler.running.preemption.note_step(tokens, counters.last_step_s - began_s)

    def _run(self, chunks: Sequence[Chunk]) -> int:
        """Execute and commit, part by part if some of it fails; how many tokens were computed."""
        short, tokens = False, 0
        for outcome in self._steps.run(chunks, self._scheduler.pool):
            match outcome:
                case Executed(group, sampled):
                    tokens += sum(chunk.end - chunk.start for chunk in group)
                    self._commit(group, sampled)
                case Failed(sequence, error):
                    log.error("request %s failed", sequence.id, exc_info=error)
                    failed = self._live[sequence.id]
                    self._end(failed, FinishReason.ERROR, f"{type(error).__name__}: {error}", ENGINE_ERROR)
                case OutOfMemory(count, wanted):
                    log.warning("memory is short for a step of %d requests and %d tokens", count, wanted)
                    if not short:
                        self._scheduler.budget.halve()
                        self._memory.relieve()
                    short = True
        if not short:
            self._scheduler.budget.recover()
        self._abort_failed()
        return tokens

    def _thin(self) -> None:
        """Thin requests that have come to where that is due, the first in rank, and as many as a step has time for."""
        left = MOST_THINNED_SLOTS
        for sequence in self._scheduler.running.due():
            left -= sequence.slots
            try:
                self._model.thin(self._scheduler.running.thinning(sequence))
            except Exception as error:
                log.exception("request %s failed while it was thinned", sequence.id)
                failed = self._live[sequence.id]
                self._end(failed, FinishReason.ERROR, f"{type(error).__name__}: {error}", ENGINE_ERROR)
            else:
                self._scheduler.running.thin(sequence)
            if left <= 0:
                break
        self._abort_failed()

    def _abort_failed(self) -> None:
        """Drop the other completions of requests of which one has failed."""
        while self._failed:
            self.abort(self._failed.pop())

    def _commit(self, chunks: Sequence[Chunk], sampled: Sampled) -> None:
        now_s = self._clock()
        size = len(chunks)
        self._counters.max_batch_size = max(self._counters.max_batch_size, size)
        row, texts = 0, iter(sampled.pooled or ())
        for (sequence, start, end), choices in zip(chunks, self._scheduler.commit(chunks), strict=True):
            generation = self._live[sequence.id]
            generation.count_step(size)
            if sequence.pooling is not None and (taken := sequence.unpooled(start, end)):
                generation.pool(next(texts), taken.stop)
            scores = len(sequence.unscored(start, end)) if sequence.prompt_logprobs >= 0 else 0
            if scores:
                generation.score(sampled.reports(row, row + scores))
                row += scores
            if choices:
                report = sampled.logprobs[row] if sampled.logprobs is not None else None
                self._take(generation, sampled.tokens[row : row + choices], now_s, report)
                row += choices
            elif sequence.complete:
                self._end(generation, FinishReason.LENGTH)

    def _take(self, generation: Generation, chosen: Sequence[int], now_s: float, report: TokenLogprobs | None) -> None:
        """Add the token that was chosen, and those chosen after drafts that it confirms one after the other."""
        sequence = generation.sequence
        known, drafts = len(sequence.tokens), sequence.drafts
        for place, token in enumerate(chosen):
            self._reports.add(generation.append(token, now_s, report))
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

    def _end(
        self, generation: Generation, reason: FinishReason, error: str | None = None, code: str | None = None
    ) -> None:
        """End a request for a reason that is not its own last token."""
        self._conclude(generation, reason)
        self._retire(generation, error, code)

    def _conclude(self, generation: Generation, reason: FinishReason) -> None:
        self._reports.add(generation.end(reason))

    def _retire(self, generation: Generation, error: str | None = None, code: str | None = None) -> None:
        if self._live.pop(generation.id, None) is not None:
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
        self._record(choices)

    def _record(self, choices: Choices) -> None:
        self._reports.finish(choices.output(self._clock()))
