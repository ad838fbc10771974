"""Tokens that a second, smaller model guesses ahead (`engine.speculation` has the first source of guesses). No torch.

The draft model's keys and values lie in pages of its own under the ids of the model's pages: who holds a page holds
both, so there is nothing to allocate, to give back or to roll back. What of a sequence is written is a count, and
falls back to the tokens that came true. A page that another sequence has written is found by its hash.

The draft chooses as the model will, by the request's parameters and the same random number of (seed, position), so
that seeded sampling is guessed as well as greedy decoding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from engine.batch import Batch, Model, check_sampled
from engine.memory import Move, Page
from engine.pace import StepTimes, best_count
from engine.sequence import TokenSequence
from kernels.sampling import SamplingBatch

log = logging.getLogger(__name__)

TRUST_AT_FIRST = 0.7
NEWEST_WEIGHT = 0.1
"""Of the newest guess in a trust."""
PROBE_EVERY = 64
"""Steps without a draft after which one is made all the same, so that a change is noticed."""


@dataclass(slots=True)
class Drafted:
    """What the draft model has of one sequence."""

    stay: int
    """The sequence's `stays`: another stay has other pages."""
    trust: float
    """Chance that the next draft comes true."""
    computed: int = 0
    """Known tokens whose keys and values are written."""
    known: int = 0
    """Tokens that were known when the last drafts were made."""
    drafts: list[int] = field(default_factory=list)

    def judge(self, tokens: Sequence[int]) -> list[bool]:
        """Which of the last drafts came true, up to the first one that didn't; none of them is looked at again."""
        came = tokens[self.known :]
        found: list[bool] = []
        for draft, token in zip(self.drafts, came, strict=False):
            found.append(draft == token)
            self.trust += NEWEST_WEIGHT * (found[-1] - self.trust)
            if draft != token:
                break
        if self.drafts:
            self.computed = self.known + min(sum(found), len(self.drafts) - 1)
        self.drafts = []
        return found


@dataclass(slots=True)
class _Row:
    """A sequence in one round: what of it the draft model is to compute, and how many drafts it may have."""

    sequence: TokenSequence
    state: Drafted
    most: int

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens + self.state.drafts

    @property
    def goes_on(self) -> bool:
        """Whether one more draft is wanted."""
        drafts = self.state.drafts
        return len(drafts) < self.most and not (drafts and drafts[-1] in self.sequence.end_ids)


class Drafter:
    """Guesses by a draft model: fulfils `engine.speculation.Drafter`."""

    def __init__(
        self,
        model: Model,
        page_size: int,
        context_len: int,
        most_tokens: int,
        most: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """The model sees `context_len` tokens and computes `most_tokens` in one step at most; `most` drafts of each."""
        self._model = model
        self._page_size = page_size
        self._context_len = context_len
        self._most_tokens = most_tokens
        self._most = most
        self._clock = clock
        self.times = StepTimes()
        self.target_times = StepTimes()
        """Of the model that checks the drafts."""
        self.trust = TRUST_AT_FIRST
        """Over all sequences; that of a new one."""
        self._states: WeakKeyDictionary[TokenSequence, Drafted] = WeakKeyDictionary()
        self._written: dict[int, bytes] = {}
        """Pages whose keys and values are written in full: their ids, and the hashes of what they hold."""
        self._since_draft = 0
        self.failed = False
        """Whether the draft model has raised: it is asked no more."""

    def propose(self, wanted: Sequence[tuple[TokenSequence, int]], rows: int) -> list[list[int]]:
        """Drafts of each sequence, at most so many; for a step that computes `rows` tokens without them.

        None if they would cost more than they bring, and none any more after the draft model has failed.
        """
        states = [self._state(sequence) for sequence, _ in wanted]
        count = self._count(states, rows)
        if not count or self.failed:
            return [[] for _ in wanted]
        entered = [
            _Row(sequence, state, min(count, most, self._context_len - len(sequence.tokens)))
            for (sequence, most), state in zip(wanted, states, strict=True)
            if not sequence.gone_pages
        ]
        try:
            self._draft([row for row in entered if row.most > 0], count)
        except Exception:
            log.exception("the draft model failed: it guesses no more")
            self.failed = True
            return [[] for _ in wanted]
        return [state.drafts for state in states]

    def move(self, moves: Sequence[Move]) -> None:
        """Pages have other ids now."""
        moved = {move.target: self._written.pop(move.source, None) for move in moves}
        self._written |= {page: hash_ for page, hash_ in moved.items() if hash_ is not None}

    def forget(self) -> None:
        """No page holds anything any more."""
        self._written.clear()
        self._states.clear()

    def _state(self, sequence: TokenSequence) -> Drafted:
        state = self._states.get(sequence)
        if state is None or state.stay != sequence.stays:
            state = self._states[sequence] = Drafted(sequence.stays, self.trust if state is None else state.trust)
        for right in state.judge(sequence.tokens):
            self.trust += NEWEST_WEIGHT * (right - self.trust)
        return state

    def _count(self, states: Sequence[Drafted], rows: int) -> int:
        """How many drafts to make of each."""
        count = best_count(
            [state.trust for state in states],
            rows,
            self._most,
            self.target_times.estimate_s,
            self.times.estimate_s(len(states)),
        )
        self._since_draft = 0 if count else self._since_draft + 1
        if self._since_draft >= PROBE_EVERY:
            self._since_draft, count = 0, 1
        return count

    def _draft(self, rows: list[_Row], count: int) -> None:
        """Bring the draft model up to what is known, and let it go on from there."""
        left, ready, chunks = self._most_tokens, [], []
        for row in rows:
            state, known = row.state, len(row.sequence.tokens)
            self._find(row)
            end = self._gap_end(row, min(known, state.computed + left))
            if end > state.computed:
                left -= end - state.computed
                chunks.append((row, state.computed, end))
                self._note_written(row.sequence, state.computed, end)
                state.computed = end
            if end == known:
                ready.append(row)
        for _ in range(count):
            if not chunks:
                break
            self._step(chunks)
            ready = [row for row in ready if row.goes_on]
            chunks = [(row, len(row.tokens) - 1, len(row.tokens)) for row in ready]
        for row in rows:
            row.state.known = len(row.sequence.tokens)

    def _find(self, row: _Row) -> None:
        """Pass pages that another sequence has written."""
        state, page_size = row.state, self._page_size
        while (end := (state.computed // page_size + 1) * page_size) < len(row.sequence.tokens):
            if not self._is_written(row.sequence.pages[state.computed // page_size]):
                return
            state.computed = end

    def _gap_end(self, row: _Row, end: int) -> int:
        """Where the next page begins that another sequence has written, or `end`: nobody writes it once more."""
        page_size = self._page_size
        for index in range(row.state.computed // page_size + 1, end // page_size):
            if self._is_written(row.sequence.pages[index]):
                return index * page_size
        return end

    def _is_written(self, page: Page) -> bool:
        return page.hash is not None and self._written.get(page.id) == page.hash

    def _note_written(self, sequence: TokenSequence, start: int, end: int) -> None:
        for index in range(start // self._page_size, -(-end // self._page_size)):
            page = sequence.pages[index]
            if page.hash is not None and end >= (index + 1) * self._page_size:
                self._written[page.id] = page.hash
            else:
                self._written.pop(page.id, None)

    def _step(self, chunks: Sequence[tuple[_Row, int, int]]) -> None:
        """Compute these tokens, and add a draft to each sequence whose last token is among them."""
        began_s = self._clock()
        batch, chosen = self._batch(chunks)
        sampled = self._model.execute(batch)
        check_sampled(sampled, batch, self._model.info.vocab_size)
        for row, token in zip(chosen, sampled.tokens, strict=True):
            row.state.drafts.append(token)
        if len(batch.token_ids) <= 2 * len(chunks):
            self.times.note(len(chunks), self._clock() - began_s)

    def _batch(self, chunks: Sequence[tuple[_Row, int, int]]) -> tuple[Batch, list[_Row]]:
        token_ids: list[int] = []
        positions: list[int] = []
        starts, sampled, chosen = [0], [], []
        for row, start, end in chunks:
            tokens = row.tokens
            token_ids += tokens[start:end]
            positions += range(start, end)
            starts.append(len(token_ids))
            if end == len(tokens):
                sampled.append(len(token_ids) - 1)
                chosen.append(row)
        size = self._page_size
        tables = [[page.id for page in row.sequence.pages] for row, _, _ in chunks]
        how = [row.sequence.sampling for row in chosen]
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slots=[
                table[at // size] * size + at % size
                for table, (_, start, end) in zip(tables, chunks, strict=True)
                for at in range(start, end)
            ],
            query_start=starts,
            context_len=[end for _, _, end in chunks],
            block_tables=tables,
            sample_rows=sampled,
            sampling=SamplingBatch(
                temperature=tuple(one.temperature for one in how),
                top_k=tuple(one.top_k for one in how),
                top_p=tuple(one.top_p for one in how),
                min_p=tuple(one.min_p for one in how),
                seed=tuple(one.seed for one in how),
                position=tuple(len(row.tokens) for row in chosen),
                banned=((),) * len(how),
            ),
            known_tokens=[row.tokens for row, _, _ in chunks],
        ), chosen
