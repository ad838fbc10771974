"""One step's work in plain integers: the border between scheduling and the device. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol, runtime_checkable

import numpy as np

from engine.memory import Page
from engine.memory.machine import DeviceMemory
from engine.memory.storage import KVStorage
from engine.pooling import Pooling
from engine.rows import Rows
from engine.scheduler import Chunk
from engine.sequence import TokenSequence
from kernels.kv import KVLayout, Thinning
from kernels.sampling import NO_TOKEN, Sampled, SamplingBatch
from text.bundle import TextBundle


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of R requests, flat, as `kernels.protocol.AttentionMetadata` describes; S rows are sampled."""

    token_ids: list[int]
    """[T]"""
    positions: list[int]
    """[T]"""
    slots: list[int]
    """[T] page * page_size + offset"""
    query_start: list[int]
    """[R + 1]"""
    context_len: list[int]
    """[R]"""
    block_tables: list[list[int]]
    """[R] ids of each request's pages, in order"""
    sample_rows: list[int]
    """[S] rows of the flat batch whose logits are wanted, in ascending order"""
    sampling: SamplingBatch
    pooled: list[tuple[int, int]] = field(default_factory=list)
    """[N] first row and end of rows whose last hidden states are to be summed"""
    adapters: list[int] = field(default_factory=list)
    """[R] which of the model's adapters each request has, counted from 1, 0 for none; empty if none has any"""
    known_tokens: list[list[int]] = field(default_factory=list)
    """[R] the tokens of each request: its context, and those that aren't computed yet; read only"""
    carried: list[tuple[int, int]] = field(default_factory=list)
    """(row of the flat batch, sampled row of the step before it, whose token it takes): `token_ids` has 0 there, and
    the request's `known_tokens` may lack it"""
    evicted: list[int] = field(default_factory=list)
    """[R] tokens of each context that aren't kept: `context_len` counts the others; empty if all of all are kept"""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the scheduler and the door have to know of a loaded model."""

    revision: str
    """Hash that changes with the weights, the tokenizer or the template."""
    device: str
    dtype: str
    """Of the weights and the KV, as torch names it; of quantised weights their form: `int8`, `gguf`."""
    context_len: int
    """The model's own limit, tokens."""
    vocab_size: int
    """Ids that may be sampled: the model cuts its logits to so many columns, however many rows its head has."""
    kv_bytes_per_token: int
    """Over all layers, keys and values."""
    text: TextBundle
    pooling: Pooling | None = None
    """How it makes a vector of a text; None if it makes none."""
    reach_tokens: int | None = None
    """Tokens that a token sees in the widest layer, with itself; None for all. What lies behind is never read."""
    generates: bool = True
    """Whether it has a head that chooses tokens."""
    draft_kv_bytes_per_token: int = 0
    """What a draft model keeps of each token besides."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """The adapters that requests may name, with their revisions, in the order of their numbers."""


HOST_KV_BYTES = 2**30
"""KV memory of a model on the CPU, unless told otherwise."""


class Model(Protocol):
    """A resident model with its KV storage: `engine.cpu.model.CpuModel`, `engine.runner.TorchModel`, the fake one.

    What it raises ends the requests of the step; `engine.executor.ModelFailed` ends the engine.
    """

    info: ModelInfo

    @property
    def cheap_rows(self) -> int:
        """Rows that a step computes for little more than it takes to compute one.

        0 if a row's result may depend on how many are computed together: no tokens are guessed then.
        """
        ...

    @property
    def default_kv_bytes(self) -> int | None:
        """KV memory unless told otherwise; None takes all that is left of the device."""
        ...

    def memory(self) -> DeviceMemory:
        """The device's memory now."""
        ...

    def take_peak_bytes(self) -> int:
        """The most of the device's memory that was in use at once since the last call."""
        ...

    def activation_bytes(self, tokens: int, rows: int) -> int:
        """What a step of so many tokens, of which so many rows are sampled, should need: from the structure."""
        ...

    def kv_layout(self, page_size: int) -> KVLayout:
        """How the model's KV lies in pages of `page_size` tokens."""
        ...

    def allocate_kv(self, layout: KVLayout, units: int, most_units: int) -> KVStorage:
        """Reserve the KV storage, to grow up to `most_units` where that costs nothing; before the first step."""
        ...

    def record(self) -> None:
        """Make ready what makes steps faster, where the device has that; after `allocate_kv`."""
        ...

    def release_kv(self) -> None:
        """Give the KV storage's memory back; `allocate_kv` may follow."""
        ...

    def sleep(self) -> None:
        """Give the weights' memory back; nothing runs until `wake`."""
        ...

    def wake(self) -> None:
        """Load the same weights again. Raises and stays asleep if they can't be had."""
        ...

    def execute(self, batch: Batch) -> Sampled:
        """Run one step: write the KV of its T tokens, choose a token for each of its S rows, sum its pooled rows."""
        ...

    def thin(self, work: Thinning) -> None:
        """Thin one request's context in its pages, between two steps."""
        ...

    def close(self) -> None:
        """Release weights and KV."""
        ...


@runtime_checkable
class Perishable(Protocol):
    """A model that may be lost between two steps, because parts of it are processes."""

    def on_loss(self, call: Callable[[str], None]) -> None:
        """Have `call` called once, on any thread, with what happened if the model is lost."""
        ...


_page_id = attrgetter("id")


_NONE: Mapping[TokenSequence, int] = {}


def build_batch(chunks: Sequence[Chunk], page_size: int, before: Mapping[TokenSequence, int] = _NONE) -> Batch:
    """The flat form of a plan's chunks. Lists of the sequences are referred to, not copied.

    `before` has the sampled row of each sequence in the step that is under way, for those whose token it chooses.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start = [0]
    known_tokens: list[list[int]] = []
    pooled: list[tuple[int, int]] = []
    carried: list[tuple[int, int]] = []
    evicted = [chunk.sequence.evicted for chunk in chunks]
    rows = Rows()
    for chunk in chunks:
        sequence, start, end = chunk
        tokens = sequence.tokens
        if end > len(tokens):
            if sequence.coming:
                carried.append((len(token_ids), before[sequence]))
            else:
                tokens = tokens + sequence.drafts
        known_tokens.append(tokens)
        rows.add(chunk, len(token_ids))
        if sequence.pooling is not None and (taken := sequence.unpooled(start, end)):
            first = len(token_ids) - start
            pooled.append((first + taken.start, first + taken.stop))
        if end - start == 1:
            token_ids.append(tokens[start] if start < len(tokens) else 0)
            positions.append(start)
            page, offset = divmod(start - sequence.evicted, page_size)
            slots.append(sequence.pages[page].id * page_size + offset)
        else:
            token_ids += tokens[start:end]
            positions += range(start, end)
            slots += _slots(sequence.pages, start - sequence.evicted, end - sequence.evicted, page_size)
        query_start.append(len(token_ids))
    adapters = [chunk.sequence.adapter for chunk in chunks]
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_start=query_start,
        context_len=[chunk.end - chunk.sequence.evicted for chunk in chunks],
        block_tables=[list(map(_page_id, chunk.sequence.pages)) for chunk in chunks],
        sample_rows=rows.flat,
        sampling=rows.sampling(),
        pooled=pooled,
        adapters=adapters if any(adapters) else [],
        known_tokens=known_tokens,
        carried=carried,
        evicted=evicted if any(evicted) else [],
    )


class NoNumbers(RuntimeError):
    """Logits or hidden states that are NaN or infinite: no token can be chosen by them, no vector made."""

    def __init__(self) -> None:
        super().__init__("the model's logits are no numbers")


def check_sampled(sampled: Sampled, batch: Batch, vocab_size: int) -> None:
    """Raise RuntimeError for an answer that doesn't fit the batch: it would be committed as somebody's tokens.

    Raises its kind `NoNumbers` if a row has no token, or a logprob or a sum is no number.
    """
    tokens, rows, asked = sampled.tokens, len(batch.sample_rows), batch.sampling.logprobs
    if len(tokens) != rows:
        raise RuntimeError(f"the model returned {len(tokens)} tokens for {rows} rows")
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        if NO_TOKEN in tokens:
            raise NoNumbers
        raise RuntimeError("the model returned a token outside its vocabulary")
    if len(sampled.pooled or ()) != len(batch.pooled):
        raise RuntimeError(f"the model returned {len(sampled.pooled or ())} sums for {len(batch.pooled)} texts")
    if asked is not None:
        told = sampled.logprobs or []
        if len(told) != rows or any(count >= 0 and one is None for count, one in zip(asked, told, strict=True)):
            raise RuntimeError("the model returned no logprobs for a row that reports them")
        if any(one is not None and math.isnan(one.logprob) for one in told):
            raise NoNumbers
    if not all(np.isfinite(sums).all() for sums in sampled.pooled or ()):
        raise NoNumbers


def _slots(pages: list[Page], start: int, end: int, page_size: int) -> Iterator[int]:
    while start < end:
        page, offset = divmod(start, page_size)
        count = min(page_size - offset, end - start)
        first = pages[page].id * page_size + offset
        yield from range(first, first + count)
        start += count
