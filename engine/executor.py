"""Runs a step's chunks on the model, and finds the request at fault when it raises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.batch import Model, build_batch, check_sampled
from engine.memory import PagePool
from engine.scheduler import Chunk
from engine.sequence import TokenSequence
from kernels.sampling import Sampled

OOM_TYPES = frozenset({"OutOfMemoryError"})
"""Names of the exceptions by which devices say that their memory is full, besides `MemoryError`."""
OOM_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory")
"""What a plain RuntimeError says then."""


class ModelFailed(RuntimeError):
    """The model runs nothing any more. The engine has to be given up."""


@dataclass(frozen=True, slots=True)
class Executed:
    """Chunks whose KV is written, and what was sampled of those that reach their last known token."""

    chunks: Sequence[Chunk]
    sampled: Sampled


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that can't be computed."""

    sequence: TokenSequence
    error: Exception


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The model lacked memory for a group of chunks; smaller ones are tried."""

    chunks: int
    tokens: int


Outcome = Executed | Failed | OutOfMemory


class Steps(Protocol):
    """How steps are run: each at once, or behind the host's back."""

    @property
    def busy(self) -> bool:
        """Whether something is under way, of which `run` will tell."""
        ...

    @property
    def decides(self) -> bool:
        """Whether what is under way decides on what can be planned: `run` has to tell of it first."""
        ...

    def run(self, chunks: Sequence[Chunk], pool: PagePool) -> Iterator[Outcome]:
        """Run the chunks, if there are any, and tell what became of those that are over.

        The caller commits each part before it asks for the next.
        """
        ...

    def forget(self) -> None:
        """Never tell of what is under way."""
        ...


class Executor:
    """One model's steps, each over when `run` ends: fulfils `Steps`."""

    busy = False
    decides = False

    def __init__(self, model: Model, page_size: int) -> None:
        self._model = model
        self._page_size = page_size

    def run(self, chunks: Sequence[Chunk], pool: PagePool) -> Iterator[Outcome]:
        """What became of the chunks.

        If the model raises, halves are tried until the request at fault is alone. A lone chunk for
        which memory is short is cut, and what is left of it is for a later step; one that can't be cut is
        tried once more, because the caller gives memory back at the first shortage. Raises `ModelFailed`
        if nothing runs.
        """
        groups = [chunks]
        succeeded, failed, relieved = False, False, False
        while groups:
            group = groups.pop()
            try:
                sampled = self.execute(group)
            except ModelFailed:
                raise
            except Exception as error:
                short = is_out_of_memory(error)
                if short:
                    yield OutOfMemory(len(group), sum(chunk.end - chunk.start for chunk in group))
                smaller = _halves(group, short)
                if smaller:
                    groups += reversed(smaller)
                elif short and not relieved:
                    groups.append(group)
                else:
                    failed = True
                    yield Failed(group[0].sequence, error)
                relieved = relieved or short
            else:
                succeeded = True
                yield Executed(group, sampled)
        if failed and not succeeded:
            self._probe(pool)

    def forget(self) -> None:
        """Nothing is ever under way."""

    def execute(self, chunks: Sequence[Chunk]) -> Sampled:
        """Run chunks as one batch, and check that the answer has a meaning."""
        batch = build_batch(chunks, self._page_size)
        sampled = self._model.execute(batch)
        check_sampled(sampled, batch, self._model.info.vocab_size)
        return sampled

    def _probe(self, pool: PagePool) -> None:
        """Run one token of nobody's. If even that raises, the model is at fault and not the requests."""
        pages = pool.allocate(1)
        token = TokenSequence(id="probe", tokens=[0], prompt_tokens=1, max_len=2, pages=pages)
        try:
            self.execute([Chunk(token, 0, 1)])
        except ModelFailed:
            raise
        except Exception as error:
            raise ModelFailed(f"the model can't run any request: {type(error).__name__}: {error}") from error
        finally:
            pool.release(pages)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory, as far as the exception tells."""
    if isinstance(error, MemoryError) or type(error).__name__ in OOM_TYPES:
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OOM_WORDS)


def _halves(group: Sequence[Chunk], short_of_memory: bool) -> list[Sequence[Chunk]]:
    """What to try instead of a group; nothing if it can't be made smaller."""
    if len(group) > 1:
        middle = len(group) // 2
        return [group[:middle], group[middle:]]
    sequence, start, end = group[0]
    if short_of_memory and end - start > 1:
        return [[Chunk(sequence, start, (start + end) // 2)]]
    return []
