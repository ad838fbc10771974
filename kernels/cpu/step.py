"""A whole model's step in one call of the library: the structs of `src/step_types.h`, filled and kept alive."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.adapters import SHRUNK, AdaptersStruct, PackedAdapters
from kernels.cpu.layers import Heads, HeadShape, address
from kernels.cpu.library import Team
from kernels.cpu.packing import INTERLEAVED_ROWS, TILE_OUTPUTS, Packed, WeightsStruct
from kernels.cpu.sampling import Chosen, Rows, rows_with_logits, select
from kernels.cpu.screen import Screen, ScreenStruct
from kernels.kv import KVLayout
from kernels.sampling import Sampled, SamplingBatch

PHASES = ("embed", "norm", "qkv", "rotary", "attention", "output", "gate_up", "down", "head", "sample")
"""What `ModelStep.seconds` counts."""

LOGIT_ROWS = 64
"""Rows whose logits are kept at once."""
SAMPLING_BYTES_PER_ID = 29
"""Of the vocabulary, for each thread that samples."""

Floats = NDArray[np.float32]
T = TypeVar("T")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, WeightsStruct) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("qkv_bias", "output_bias", "gate_up_bias", "down_bias")),
        *((f"{name}_adapters", AdaptersStruct) for name in ("qkv", "output", "gate_up", "down")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("heads", HeadShape),
        ("layers", ctypes.c_int32),
        ("hidden", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("embedding", WeightsStruct),
        ("head", WeightsStruct),
        ("screen", ScreenStruct),
        ("norm", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("norm_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("pages_per_extent", ctypes.c_int64),
        ("extent_bytes", ctypes.c_int64),
        ("page_bytes", ctypes.c_int64),
        ("layer_bytes", ctypes.c_int64),
    )


class _Sampling(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("top_ids", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
        ("most_top", ctypes.c_int64),
    )


SIZES_BYTES = {_Layer: 320, _Model: 216, _Sampling: 40}
"""As src/abi_step.h asserts them."""
if any(ctypes.sizeof(struct) != size for struct, size in SIZES_BYTES.items()):
    raise ImportError("the structs of kernels.cpu.step differ from those of the C++ library")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights. Norms and biases are float32; the bias of `gate_up` is in the order of its packed rows."""

    qkv: Packed
    output: Packed
    gate_up: Packed
    down: Packed
    attention_norm: Floats
    mlp_norm: Floats
    q_norm: Floats | None = None
    k_norm: Floats | None = None
    qkv_bias: Floats | None = None
    output_bias: Floats | None = None
    gate_up_bias: Floats | None = None
    down_bias: Floats | None = None
    qkv_adapters: PackedAdapters | None = None
    output_adapters: PackedAdapters | None = None
    gate_up_adapters: PackedAdapters | None = None
    down_adapters: PackedAdapters | None = None

    @property
    def adapters(self) -> tuple[tuple[Packed, PackedAdapters | None], ...]:
        """Each matrix with the adapters that there are of it."""
        return (
            (self.qkv, self.qkv_adapters),
            (self.output, self.output_adapters),
            (self.gate_up, self.gate_up_adapters),
            (self.down, self.down_adapters),
        )


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """A decoder as the library walks through it."""

    heads: Heads
    hidden: int
    inner: int
    layers: Sequence[Layer]
    embedding: Packed
    head: Packed
    """The embedding again if the two are tied, cut to the ids that may be sampled."""
    norm: Floats
    cos_sin: Floats
    """[positions, 2, head size / 2]"""
    norm_eps: float
    scale: float
    """Of the attention's scores."""
    screen: Screen | None = None
    """The head in 8 bits, which spares greedy rows most of the head; only if that is float32 or bf16."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """T tokens of R requests, flat, as plain integers: request r owns the rows `query_start[r] : query_start[r + 1]`,
    the last of its `context_len[r]` tokens, whose KV is on the pages `block_tables[r]`."""

    token_ids: Sequence[int]
    query_start: Sequence[int]
    context_len: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    sample_rows: Sequence[int]
    evicted: Sequence[int] = ()
    """Tokens of each context that aren't kept, which `context_len` doesn't count; () if all of all are."""
    adapters: Sequence[int] = ()
    """[R] which adapter each request has, counted from 1, 0 for none; empty if none has any."""

    def numbers(self, sample_rows: Sequence[int], greedy: int) -> NDArray[np.int32]:
        """The array that `StepWork` of src/step_state.h reads; the first `greedy` samples need no logits."""
        tables = self.block_tables
        return np.array(
            [
                len(self.token_ids), len(tables), len(sample_rows), greedy, sum(map(len, tables)), len(self.adapters),
                *self.token_ids, *self.query_start, *self.context_len,
                *(self.evicted or [0] * len(tables)), *map(len, tables),
                *itertools.chain.from_iterable(tables), *sample_rows, *self.adapters,
            ],
            np.int32,
        )  # fmt: skip


class ModelStep:
    """Runs steps of one model over an arena of KV pages. One call at a time; close it when done."""

    def __init__(self, team: Team, model: DecoderModel, layout: KVLayout, most_rows: int) -> None:
        """There is memory for steps of `most_rows` tokens, each of which may be sampled."""
        _check(model, layout)
        self._team = team
        self._kept = model
        layers = (_Layer * len(model.layers))(*(_layer_struct(layer) for layer in model.layers))
        cdll = team.library.cdll
        cdll.headrace_step_create.restype = ctypes.c_void_p
        handle = cdll.headrace_step_create(
            ctypes.byref(_model_struct(model, layout)),
            layers,
            ctypes.c_int32(team.threads),
            ctypes.c_int64(most_rows),
        )
        if not handle:
            raise MemoryError(f"there is no memory for steps of {most_rows} tokens")
        self._handle = ctypes.c_void_p(handle)
        self._most_rows = most_rows
        self._vocab = model.head.outputs
        self._adapters = adapter_count(model)

    def run(self, work: StepWork, sampling: SamplingBatch, arena: int) -> Sampled:
        """Compute one step over the arena that begins at an address, and choose the tokens of its sampled rows."""
        rows, samples = len(work.token_ids), len(work.sample_rows)
        if rows > self._most_rows or samples > self._most_rows:
            raise ValueError(f"a step of {rows} rows has no memory: there is some for {self._most_rows}")
        if work.adapters and not 0 <= min(work.adapters) <= max(work.adapters) <= self._adapters:
            raise ValueError(f"a request has an adapter that is none of the {self._adapters}")
        others = rows_with_logits(sampling)
        tokens = np.empty(samples, np.int32)
        if not others:
            self._run(work.numbers(work.sample_rows, samples), tokens, _Sampling(), arena)
            return Sampled(tokens.tolist())
        apart = set(others)
        order = [*(row for row in range(samples) if row not in apart), *others]
        results = Chosen(Rows(select(sampling, others), self._vocab))
        self._run(
            work.numbers([work.sample_rows[row] for row in order], samples - len(others)),
            tokens,
            _Sampling(
                address(results.rows.structs),
                address(results.chosen),
                address(results.top_ids),
                address(results.top_logprobs),
                results.most_top,
            ),
            arena,
        )
        reports = results.reports()
        return Sampled(
            _scattered(tokens.tolist(), order),
            None if reports is None else _scattered([None] * (samples - len(others)) + reports, order),
        )

    def _run(self, numbers: NDArray[np.int32], tokens: NDArray[np.int32], sampling: _Sampling, arena: int) -> None:
        self._team.library.call(
            "step_run",
            self._team.handle,
            self._handle,
            ctypes.c_void_p(numbers.ctypes.data),
            ctypes.c_void_p(arena),
            ctypes.c_void_p(tokens.ctypes.data),
            ctypes.byref(sampling),
        )

    def seconds(self) -> dict[str, float]:
        """Time of one thread in each phase since the last call; the first call starts the counting."""
        seconds = np.empty(len(PHASES))
        self._team.library.cdll.headrace_step_seconds(self._handle, ctypes.c_void_p(seconds.ctypes.data))
        return dict(zip(PHASES, seconds.tolist(), strict=True))

    def close(self) -> None:
        """Release the step's memory; a second call does nothing."""
        if self._handle:
            self._team.library.cdll.headrace_step_destroy(self._handle)
            self._handle = ctypes.c_void_p()


def step_bytes(model: DecoderModel, threads: int, rows: int, samples: int) -> int:
    """What a step of so many rows, of which so many are sampled, holds beside weights and KV: src/step_state.cpp."""
    heads = model.heads
    element = np.dtype(heads.element).itemsize
    queries = heads.heads * heads.head_size
    projected = queries + 2 * heads.kv_heads * heads.head_size
    widest = max(model.hidden, model.inner, queries)
    row = 4 * (model.hidden + projected + widest) + element * (queries + model.inner) + widest // 4
    vocab = model.head.outputs
    screened = 0 if model.screen is None else model.hidden + model.hidden // 4 + vocab // 8
    logits = min(samples, LOGIT_ROWS) * 4 * vocab + threads * SAMPLING_BYTES_PER_ID * vocab
    shrunk = [adapters.low for layer in model.layers for _, adapters in layer.adapters if adapters is not None]
    return rows * (row + 4 * max(shrunk, default=0)) + samples * screened + logits


def adapter_count(model: DecoderModel) -> int:
    """Adapters that the model has."""
    return max((a.count for layer in model.layers for _, a in layer.adapters if a is not None), default=0)


def _scattered(values: Sequence[T], order: Sequence[int]) -> list[T]:
    """Each value at the place that `order` gives it."""
    return [value for _, value in sorted(zip(order, values, strict=True), key=itemgetter(0))]


def _check(model: DecoderModel, layout: KVLayout) -> None:
    """Raise ValueError unless all shapes fit each other: the library believes them."""
    heads = model.heads
    queries = heads.heads * heads.head_size
    both = queries + 2 * heads.kv_heads * heads.head_size
    gated = 2 * (-(-model.inner // INTERLEAVED_ROWS) * INTERLEAVED_ROWS)
    if layout.layer_bytes != heads.layer_bytes or layout.layers != len(model.layers):
        raise ValueError(f"pages of {layout} don't fit {len(model.layers)} layers of {heads}")
    shapes: list[tuple[Packed, int, int]] = []
    for layer in model.layers:
        shapes += [
            (layer.qkv, both, model.hidden),
            (layer.output, model.hidden, queries),
            (layer.gate_up, gated, model.hidden),
            (layer.down, model.hidden, model.inner),
        ]
    for matrix in (model.embedding, model.head):
        shapes.append((matrix, matrix.outputs, model.hidden))
    if model.screen is not None:
        model.screen.check(model.head)
    count, is_float = adapter_count(model), heads.element is np.float32
    for layer in model.layers:
        for matrix, adapters in layer.adapters:
            if adapters is not None:
                _check_adapters(adapters, matrix, count, is_float=is_float)
    for matrix, outputs, inputs in shapes:
        if (matrix.outputs, matrix.inputs) != (outputs, inputs):
            raise ValueError(f"a matrix of {matrix.outputs} x {matrix.inputs} should be {outputs} x {inputs}")


def _check_adapters(adapters: PackedAdapters, matrix: Packed, count: int, *, is_float: bool) -> None:
    tiles = -(-matrix.outputs // TILE_OUTPUTS)
    wanted = ((count, adapters.low, matrix.inputs), (count, tiles, adapters.low, TILE_OUTPUTS), (tiles, 2))
    found = (adapters.shrink.shape, adapters.expand.shape, adapters.spans.shape)
    if (
        found != wanted
        or adapters.low % SHRUNK
        or not 0 <= adapters.spans.min() <= adapters.spans.max() <= adapters.low
    ):
        raise ValueError(f"adapters of {found} should be {wanted}")
    if {adapters.shrink.dtype, adapters.expand.dtype} != {np.dtype(np.float32 if is_float else np.uint16)}:
        raise ValueError(f"adapters of {adapters.shrink.dtype} have another type than the activations")


def _layer_struct(layer: Layer) -> _Layer:
    return _Layer(
        layer.qkv.struct(),
        layer.output.struct(),
        layer.gate_up.struct(),
        layer.down.struct(),
        *(
            address(floats)
            for floats in (
                layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm,
                layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias,
            )
        ),
        *(AdaptersStruct() if adapters is None else adapters.struct() for _, adapters in layer.adapters),
    )  # fmt: skip


def _model_struct(model: DecoderModel, layout: KVLayout) -> Any:
    return _Model(
        model.heads.struct,
        len(model.layers),
        model.hidden,
        model.inner,
        model.embedding.struct(),
        model.head.struct(),
        ScreenStruct() if model.screen is None else model.screen.struct(),
        address(model.norm),
        address(model.cos_sin),
        model.norm_eps,
        model.scale,
        layout.pages_per_extent,
        layout.extent_bytes,
        layout.page_bytes,
        layout.layer_bytes,
    )
