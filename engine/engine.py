"""The engine: requests in, one step at a time, outputs out. Usable without a thread, a queue or a database."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from engine.batch import Model, NoNumbers
from engine.choices import Choices
from engine.config import EngineConfig
from engine.contract import EngineStats
from engine.counters import Counters
from engine.drafted import DraftedModel
from engine.executor import Executed, Executor, Failed, OutOfMemory, Steps
from engine.launching import launching
from engine.memory import PagePool
from engine.pipeline import Pipeline
from engine.preparation import Preparation
from engine.reports import StepResult
from engine.request import EngineRequest, FinishReason, RequestOutput, RequestRefused
from engine.residence import Residence
from engine.roster import Roster
from engine.scheduler import Chunk, Scheduler
from kernels.sampling import Sampled
from text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MOST_THINNED_SLOTS = 16384
"""Tokens of requests that are thinned between two steps; one request is, however long it is."""
TIDY_EVERY = 64
"""Steps after which a busy engine moves a few pages together, or gives memory back."""


class Engine:
    """Schedules requests over one model and commits what it returns.

    Not thread-safe, but for `prepare` and `compiles`. Endings, whatever their cause, are reported by the next `step`;
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
        self._counters = Counters(last_step_s=self._clock())
        self._roster = Roster(self._scheduler, self._counters, clock)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def add(self, request: EngineRequest) -> None:
        """Take a request, or raise `RequestRefused`."""
        self.enter(self.prepare(request, self._clock()))

    def prepare(self, request: EngineRequest, arrived_s: float) -> Choices:
        """Tokenise a request and check it against the model's limits. Touches no state: any thread may call it."""
        return self._preparation.prepare(request, arrived_s, self.max_seq_len)

    def compiles(self, request: EngineRequest) -> bool:
        """Whether `prepare` has to compile the request's grammar, which may take seconds. Any thread may ask."""
        return self._preparation.compiles(request)

    def enter(self, choices: Choices) -> None:
        """Take a prepared request."""
        self._roster.enter(choices)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its pages; the next step reports it. Unknown ids are ignored."""
        self._roster.abort(request_id)

    def abort_all(self) -> None:
        """Drop every request, as `abort` does."""
        self._roster.abort_all()

    def refuse(self, request: EngineRequest, refused: RequestRefused, arrived_s: float) -> RequestOutput:
        """The output of a request that can't run."""
        return self._roster.reports.refused(request, refused, arrived_s)

    def aborted(self, request: EngineRequest, arrived_s: float) -> RequestOutput:
        """The output of a request that was dropped before it entered."""
        return self._roster.reports.aborted(request, arrived_s)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        scheduler = self._scheduler
        waiting = len(scheduler.waiting) > 0 and scheduler.admission.max_num_seqs > 0
        runs = not self._memory.asleep and (len(scheduler.running) or waiting or self._steps.busy)
        next_s = self._roster.next_deadline_s
        return bool(runs or self._roster.reports.ended or (next_s is not None and next_s <= self._clock()))

    def rest_s(self) -> float | None:
        """Seconds until a deadline passes or there may be something to `tidy`; None if neither will be."""
        moments = [at_s for at_s in (self._roster.next_deadline_s, self._memory.release_s) if at_s is not None]
        return max(0.0, min(moments) - self._clock()) if moments else None

    def step(self) -> StepResult:
        """Compute the next tokens of whoever is to run, and report everything since the last step.

        With steps that run behind the host's back it begins the next, and reports what the one before brought.
        Raises `ModelFailed` if the model is broken; see `abandon`.
        """
        now_s = self._clock()
        self._roster.expire(now_s)
        if self._memory.asleep:
            return self.report()
        if self._steps.decides:
            self._advance((), now_s)
        self._thin()
        plan = self._scheduler.plan(now_s)
        admitted = self._roster.admit(plan.admitted, now_s)
        self._counters.preemptions += len(plan.preempted)
        if plan.chunks or self._steps.busy:
            self._advance(plan.chunks, now_s)
        return self.report(admitted)

    def report(self, admitted: tuple[tuple[str, float], ...] = ()) -> StepResult:
        """What has not been reported yet, without computing anything."""
        return self._roster.reports.take(admitted)

    def abandon(self, error: str) -> StepResult:
        """Fail every request without touching the scheduler; for a host that gives the engine up after a fault."""
        self._steps.forget()
        cap = self._scheduler.admission.max_num_seqs
        self._memory.swap.clear()
        self._scheduler = self._new_scheduler(self._memory.fresh_pool())
        self._scheduler.admission.max_num_seqs = cap
        self._roster.abandon(error, self._scheduler)
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

    def stats(self) -> EngineStats:
        return self._counters.stats(self._scheduler)

    def check(self) -> None:
        """Raise AssertionError if an invariant of scheduler or memory is broken."""
        self._scheduler.check()
        self._memory.check()
        self._roster.check()

    def close(self) -> None:
        """Release the model. The engine is of no use afterwards."""
        self._model.close()

    def _new_scheduler(self, pool: PagePool) -> Scheduler:
        model = self._model
        reach_tokens = model.info.reach_tokens
        return Scheduler(pool, self._config, self._memory.swap, model.cheap_rows, reach_tokens, self._drafter)

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
                    if isinstance(error, NoNumbers):
                        self._scheduler.running.sharing.disown(sequence)
                    self._roster.fail(sequence, error)
                case OutOfMemory(count, wanted):
                    log.warning("memory is short for a step of %d requests and %d tokens", count, wanted)
                    if not short:
                        self._scheduler.budget.halve()
                        self._memory.relieve()
                    short = True
        if not short:
            self._scheduler.budget.recover()
        self._roster.abort_failed()
        return tokens

    def _thin(self) -> None:
        """Thin requests that have come to where that is due, the first in rank, and as many as a step has time for."""
        left = MOST_THINNED_SLOTS
        for sequence in self._scheduler.running.due():
            left -= sequence.slots
            try:
                self._model.thin(self._scheduler.running.thinning(sequence))
            except Exception as error:
                self._roster.fail(sequence, error)
            else:
                self._scheduler.running.thin(sequence)
            if left <= 0:
                break
        self._roster.abort_failed()

    def _commit(self, chunks: Sequence[Chunk], sampled: Sampled) -> None:
        now_s = self._clock()
        size = len(chunks)
        self._counters.max_batch_size = max(self._counters.max_batch_size, size)
        row, texts, live = 0, iter(sampled.pooled or ()), self._roster.live
        for (sequence, start, end), choices in zip(chunks, self._scheduler.commit(chunks), strict=True):
            generation = live[sequence.id]
            generation.count_step(size)
            if sequence.pooling is not None and (taken := sequence.unpooled(start, end)):
                generation.pool(next(texts), taken.stop)
            scores = len(sequence.unscored(start, end)) if sequence.prompt_logprobs >= 0 else 0
            first, row = row + scores, row + scores + choices
            if scores and not self._roster.score(generation, sampled.reports(first - scores, first)):
                continue
            if choices:
                report = sampled.logprobs[first] if sampled.logprobs is not None else None
                self._roster.take(generation, sampled.tokens[first:row], now_s, report)
            elif sequence.complete:
                self._roster.end(generation, FinishReason.LENGTH)
