"""Recorded steps for batches in which every request has one token: one recording for each size of batch.

Two where the model has adapters: of batches in which nobody has one, whose steps are what they would be without any,
and of the others. Who has which is among the numbers of the step, and changes nothing in what is launched.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from engine.batch import Batch
from engine.recording import Recorder, Recording
from engine.staging import Staging, layout, views
from engine.step_tensors import NO_SAMPLING, Numbers, StepTensors, padded_numbers_of
from kernels.columns import chosen_by_columns
from kernels.kv import KVLayout
from kernels.sampling import SamplingBatch

log = logging.getLogger(__name__)

SIZE_STEP = 8
"""Between two sizes of batches, from this one on; smaller ones are powers of two."""
MOST_CONTEXT_TOKENS = 8192
"""Longer contexts aren't recorded: a recorded step has programs for the longest one, and they are launched anyway."""
RECORDING_BYTES = 12 * 2**20
"""What one recording is taken to need beside the activations, which all of them share."""

Compute = Callable[[StepTensors], tuple[Tensor, Tensor]]
"""Logits float32 [S, V] of a step, and what its columns choose [S]."""


@dataclass(frozen=True, slots=True)
class Decode:
    """One size: its inputs, which stay where they are, and the step that reads them."""

    size: int
    packed: Tensor
    """[bytes] uint8: all numbers of the step"""
    tensors: StepTensors
    recording: Recording


class DecodeGraphs:
    """The recorded steps of one model over one KV storage."""

    def __init__(
        self, staging: Staging, vocab: int, kv: KVLayout, unused_page: int, most_context: int, adapters: int = 0
    ) -> None:
        """`unused_page` is where nobody's keys and values go; `adapters` is how many the model has."""
        self._staging = staging
        self._adapters = adapters
        self._vocab = vocab
        self._kv = kv
        self._unused_slot = unused_page * kv.page_size
        self._most_context = most_context
        self._width = -(-most_context // kv.page_size)
        self._decodes: dict[bool, list[Decode]] = {}
        """By whether anybody has an adapter; the smallest first."""

    def record(self, sizes: Sequence[int], recorder: Recorder, compute: Compute, storage: Callable[[], Tensor]) -> None:
        """Record a step for each size over the KV [bytes]; the largest first, whose memory serves the others."""
        kinds = kinds_of(self._adapters)
        work = [(size, adapted) for size in sorted(sizes, reverse=True) for adapted in kinds]
        for number, (size, adapted) in enumerate(work, 1):
            parts = self._parts(_everyone_adapted(size) if adapted else _EMPTY, NO_SAMPLING, size)
            packed = torch.zeros(layout(parts)[1], dtype=torch.uint8, device=storage().device)
            tensors = StepTensors.of(views(parts, packed), 1, self._most_context, self._kv)
            self._staging.send(parts, packed)
            recording = recorder.record(partial(compute, tensors), partial(_held, storage, packed))
            self._decodes.setdefault(adapted, []).insert(0, Decode(size, packed, tensors, recording))
            log.info("recorded a step of %d requests (%d of %d)", size, number, len(work))

    def fitting(self, batch: Batch) -> Decode | None:
        """The smallest recorded step that has room for a batch; None if there is none for batches of its kind."""
        requests, decodes = len(batch.context_len), self._decodes.get(bool(batch.adapters), [])
        if not decodes or requests > decodes[-1].size or max(batch.context_len) > self._most_context:
            return None
        single = len(batch.token_ids) == len(batch.sample_rows) == requests and not batch.pooled
        if not single or any(b - a != 1 for a, b in itertools.pairwise(batch.query_start)):
            return None
        return decodes[bisect_left(decodes, requests, key=attrgetter("size"))]

    def run(self, decode: Decode, batch: Batch, chosen_before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits [R, V] of a batch and what its columns choose [R], until the next step; see `StepTensors.take`."""
        requests = len(batch.context_len)
        sampling = batch.sampling if chosen_by_columns(batch.sampling) else NO_SAMPLING
        self._staging.send(self._parts(batch, sampling, decode.size), decode.packed)
        if chosen_before is not None:
            decode.tensors.take(chosen_before)
        decode.recording.replay()
        logits, chosen = decode.recording.outputs
        return logits[:requests], chosen[:requests]

    def _parts(self, batch: Batch, sampling: SamplingBatch, size: int) -> list[Numbers]:
        adapters = self._adapters if batch.adapters else 0
        return padded_numbers_of(batch, sampling, self._vocab, size, self._width, self._unused_slot, adapters)


def kinds_of(adapters: int) -> tuple[bool, ...]:
    """Whether anybody has an adapter in the steps of each size that are recorded for a model with so many."""
    return (False, True) if adapters else (False,)


def _held(storage: Callable[[], Tensor], packed: Tensor) -> tuple[Tensor, Tensor]:
    return storage(), packed


_EMPTY = Batch([], [], [], [0], [], [], [], NO_SAMPLING)


def _everyone_adapted(size: int) -> Batch:
    """So many requests with the first adapter, for whose pages nobody looks."""
    return replace(_EMPTY, query_start=list(range(size + 1)), context_len=[1] * size, adapters=[1] * size)


def sizes_up_to(most: int) -> list[int]:
    """Sizes that are recorded where up to `most` requests run: 1, 2, 4, then every eighth, and `most`."""
    return sorted({size for size in (1, 2, 4, *range(SIZE_STEP, most, SIZE_STEP)) if size < most} | {most})
