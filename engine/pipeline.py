"""Steps that are planned while the one before them runs: an `Executor` whose answers come one call later.

A step is launched with what is certain: where its tokens stand. The token that the step before it chooses is filled
in on the device. What only the host could know, it finds out one step late: a sequence that ended, failed or made way
meanwhile has been computed once too often, and that part of the answer is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

from engine.batch import Batch, build_batch, check_sampled
from engine.executor import Executed, Executor, ModelFailed, Outcome, OutOfMemory, is_out_of_memory
from engine.launching import Launched, LaunchingModel
from engine.memory import PagePool
from engine.scheduler import Chunk
from engine.sequence import TokenSequence
from kernels.sampling import Sampled


@dataclass(frozen=True, slots=True)
class Passenger:
    """One chunk of a step under way, and what it may claim of the answer."""

    chunk: Chunk
    stay: int
    """The sequence's `stays` when it boarded."""
    tokens: int
    """Known tokens whose KV it writes."""
    coming: int
    """What it added to the sequence's."""
    first_row: int
    rows: int
    """Sampled rows, from `first_row` on."""
    sums: bool
    """Whether it adds to a vector."""

    @property
    def stayed(self) -> bool:
        """Whether the sequence still holds the pages that the chunk writes to."""
        return self.chunk.sequence.stays == self.stay


@dataclass(frozen=True, slots=True)
class Flight:
    """A step under way."""

    passengers: list[Passenger]
    batch: Batch
    launched: Launched
    decides: bool
    """Whether the host has to see its answer before it can plan the next step."""

    @property
    def rows(self) -> dict[TokenSequence, int]:
        """The sampled row of each sequence whose next token comes out of it."""
        return {p.chunk.sequence: p.first_row + p.rows - 1 for p in self.passengers if p.coming and p.stayed}

    def disembark(self) -> list[Passenger]:
        """Those who are still there; nothing of theirs is under way any more."""
        stayed = [p for p in self.passengers if p.stayed]
        for p in stayed:
            p.chunk.sequence.ahead -= p.tokens
            p.chunk.sequence.coming -= p.coming
        return stayed

    def executed(self, stayed: list[Passenger], sampled: Sampled) -> Executed:
        """What the step brought to those who are still there."""
        if len(stayed) == len(self.passengers):
            return Executed([p.chunk for p in stayed], sampled)
        rows = [row for p in stayed for row in range(p.first_row, p.first_row + p.rows)]
        pooled = list(compress(sampled.pooled or (), [p.stayed for p in self.passengers if p.sums]))
        logprobs = None if sampled.logprobs is None else [sampled.logprobs[row] for row in rows]
        return Executed([p.chunk for p in stayed], Sampled([sampled.tokens[row] for row in rows], logprobs, pooled))


class Pipeline:
    """One model's steps, one under way while the next is planned. Fulfils `engine.executor.Steps`."""

    def __init__(self, model: LaunchingModel, page_size: int, *, guesses: bool) -> None:
        """`guesses` says whether tokens may be guessed ahead: that takes knowing the last one."""
        self._model = model
        self._guesses = guesses
        self._page_size = page_size
        self._executor = Executor(model, page_size)
        self._flight: Flight | None = None

    @property
    def busy(self) -> bool:
        return self._flight is not None

    @property
    def decides(self) -> bool:
        return self._flight is not None and self._flight.decides

    def run(self, chunks: Sequence[Chunk], pool: PagePool) -> Iterator[Outcome]:
        """Launch the chunks, then tell what became of those before them.

        If something goes wrong, the step is done once more as `Executor` does it, with nothing else under way: what
        was launched behind it is given up, and will be planned again. Raises `ModelFailed` as `Executor` does.
        """
        before, self._flight = self._flight, None
        fault: Exception | None = None
        if chunks:
            try:
                self._flight = self._launch(chunks, before)
            except ModelFailed:
                raise
            except Exception as error:
                fault = error
        if before is not None:
            yield from self._land(before, pool)
        if fault is not None:
            yield from self._again([chunk for chunk in chunks if _is_next(chunk)], fault, pool)

    def forget(self) -> None:
        """Expect nothing any more of what is under way."""
        self._flight = None

    def _launch(self, chunks: Sequence[Chunk], before: Flight | None) -> Flight:
        batch = build_batch(chunks, self._page_size, {} if before is None else before.rows)
        launched = self._model.launch(batch, None if before is None else before.launched)
        passengers, row = [], 0
        for chunk in chunks:
            passenger = _board(chunk, row)
            row += passenger.rows
            passengers.append(passenger)
        flight = Flight(passengers, batch, launched, any(_decides(chunk, self._guesses) for chunk in chunks))
        for p in passengers:
            p.chunk.sequence.ahead += p.tokens
            p.chunk.sequence.coming += p.coming
        return flight

    def _land(self, flight: Flight, pool: PagePool) -> Iterator[Outcome]:
        try:
            sampled = flight.launched.wait()
            check_sampled(sampled, flight.batch, self._model.info.vocab_size)
        except ModelFailed:
            raise
        except Exception as error:
            if self._flight is not None:
                self._flight.disembark()
                self._flight = None
            yield from self._again([p.chunk for p in flight.disembark()], error, pool)
        else:
            yield flight.executed(flight.disembark(), sampled)

    def _again(self, chunks: list[Chunk], error: Exception, pool: PagePool) -> Iterator[Outcome]:
        if not chunks:
            return
        if is_out_of_memory(error):
            yield OutOfMemory(len(chunks), sum(chunk.end - chunk.start for chunk in chunks))
        yield from self._executor.run(chunks, pool)


def _board(chunk: Chunk, first_row: int) -> Passenger:
    sequence, start, end = chunk
    known = len(sequence.tokens) + sequence.coming
    samples = end >= known < sequence.max_len
    rows = len(sequence.unscored(start, end)) + (end - known + 1 if samples else 0)
    return Passenger(
        chunk=chunk,
        stay=sequence.stays,
        tokens=min(end, known) - start,
        coming=int(samples and known + 1 < sequence.max_len),
        first_row=first_row,
        rows=rows,
        sums=sequence.pooling is not None and bool(sequence.unpooled(start, end)),
    )


def _decides(chunk: Chunk, guesses: bool) -> bool:
    """Whether nothing can be planned for the sequence before the host has seen what the chunk brings."""
    sequence = chunk.sequence
    if chunk.end < len(sequence.tokens):
        return sequence.prompt_logprobs >= 0 or sequence.pooling is not None
    return sequence.rules is not None or bool(sequence.drafts) or (guesses and sequence.guessable)


def _is_next(chunk: Chunk) -> bool:
    """Whether a chunk that could not be launched is still what its sequence needs next."""
    sequence, start, end = chunk
    return bool(sequence.pages) and start == sequence.computed and end <= len(sequence.tokens) + len(sequence.drafts)
