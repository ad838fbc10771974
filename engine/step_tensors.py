"""A batch as the decoder takes it: tensors on the device, and what of a step is padding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, clamp, where

from engine.batch import Batch
from kernels.adapters import AdapterRows
from kernels.columns import Columns, columns_of
from kernels.kv import KVLayout
from kernels.protocol import AttentionMetadata
from kernels.sampling import SamplingBatch

Numbers = NDArray[Any]
NO_SAMPLING = SamplingBatch((), (), (), (), (), (), ())


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What one step reads."""

    token_ids: Tensor
    """[T]"""
    meta: AttentionMetadata
    rows: Tensor
    """[S, and those of embedded texts] rows of the step whose hidden states are wanted"""
    carried: Tensor
    """[T] sampled row of the step before that has a token of this one, -1 where it is in `token_ids`"""
    columns: Columns
    adapted: AdapterRows | None
    """Which rows have which adapter; None if none has any"""

    @classmethod
    def of(cls, parts: Sequence[Tensor], max_query: int, max_context: int, layout: KVLayout) -> StepTensors:
        """From the parts of `numbers_of` or `padded_numbers_of`."""
        columns, others = parts[:6], parts[6:]
        token_ids, positions, slots, query_start, context_len, rows, carried, block_table, order, starts = others
        meta = AttentionMetadata(
            positions=positions,
            slots=slots,
            query_start=query_start,
            context_len=context_len,
            block_table=block_table,
            max_query=max_query,
            max_context=max_context,
            layout=layout,
        )
        adapted = AdapterRows(order, starts) if len(starts) else None
        return cls(token_ids, meta, rows, carried, Columns(*columns), adapted)

    def take(self, chosen: Tensor) -> None:
        """Fill in the tokens that the step before chose, [S] of it; 0 for none, as this step is given up then."""
        picked = chosen.index_select(0, self.carried.clamp(min=0))
        clamp(where(self.carried < 0, self.token_ids, picked), min=0, out=self.token_ids)


def numbers_of(batch: Batch, sampling: SamplingBatch, vocab: int, adapters: int) -> list[Numbers]:
    """All numbers of a step, those of 8 bytes first; `sampling` is the batch's, or none if the host chooses.

    There are so many `adapters`.
    """
    width = max(map(len, batch.block_tables))
    pooled = itertools.chain.from_iterable(range(*rows) for rows in batch.pooled)
    return [
        *columns_of(sampling, vocab),
        *map(_integers, (batch.token_ids, batch.positions, batch.slots, batch.query_start, batch.context_len)),
        _integers([*batch.sample_rows, *pooled]),
        _carried(batch, len(batch.token_ids) if batch.carried else 0),
        _tables(batch.block_tables, len(batch.block_tables), width),
        *map(_integers, _adapter_rows(batch, adapters)),
    ]


def padded_numbers_of(
    batch: Batch, sampling: SamplingBatch, vocab: int, size: int, width: int, unused_slot: int, adapters: int = 0
) -> list[Numbers]:
    """The same of a step in which each request has one row and is sampled: as if there were `size`.

    Those that there aren't have no row in the eyes of attention, and no adapter; their keys and values go to
    `unused_slot`. With `adapters` 0 nobody has one.
    """
    requests = len(batch.context_len)
    order, starts = _adapter_rows(batch, adapters) if adapters else ([], [])
    return [
        *(_padded(column, size) for column in columns_of(sampling, vocab)),
        _padded(_integers(batch.token_ids), size),
        _padded(_integers(batch.positions), size),
        _padded(_integers(batch.slots), size, unused_slot),
        _padded(_integers(batch.query_start), size + 1, requests),
        _padded(_integers(batch.context_len), size),
        np.arange(size, dtype=np.int32),
        _carried(batch, size),
        _tables(batch.block_tables, size, width),
        _padded(_integers(order), size if adapters else 0),
        _integers(starts),
    ]


def _adapter_rows(batch: Batch, adapters: int) -> tuple[list[int], list[int]]:
    """The two parts of the step's `AdapterRows`, both empty if no request has an adapter."""
    if not batch.adapters:
        return [], []
    rows: list[list[int]] = [[] for _ in range(adapters)]
    for number, (first, end) in zip(batch.adapters, itertools.pairwise(batch.query_start), strict=True):
        if number:
            rows[number - 1] += range(first, end)
    return list(itertools.chain.from_iterable(rows)), [0, *itertools.accumulate(map(len, rows))]


def _integers(values: Sequence[int]) -> Numbers:
    return np.array(values, np.int32)


def _padded(values: Numbers, size: int, fill: int = 0) -> Numbers:
    out = np.full(size, fill, values.dtype)
    out[: len(values)] = values
    return out


def _carried(batch: Batch, size: int) -> Numbers:
    carried = np.full(size, -1, np.int32)
    for at, row in batch.carried:
        carried[at] = row
    return carried


def _tables(tables: Sequence[Sequence[int]], requests: int, width: int) -> Numbers:
    """[requests, width], 0 where a request has no page."""
    out = np.zeros((requests, width), np.int32)
    for row, table in zip(out, tables, strict=False):
        row[: len(table)] = table
    return out
