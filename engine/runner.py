"""The model on its device: batches of plain integers in, token ids out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import HOST_KV_BYTES, Batch, ModelInfo
from engine.config import EngineConfig
from engine.devices import check_kv_dtype, choose_device, choose_dtype
from engine.fake import is_fake
from engine.memory.machine import DeviceMemory, host_memory, take_peak_bytes, trim_heap
from engine.memory.storage import KVStorage
from engine.model import ModelFiles, open_adapters, open_files, open_weights, reopen, revision, spec_of
from engine.model.adapter import Adapter, step_bytes
from engine.model.assembly import build_weights
from engine.model.decoder import Decoder
from engine.model.foreign import ForeignDecoder, load_foreign
from engine.model.gguf_file import GGUFFile
from engine.model.ops import usable_ops
from engine.model.quantised import check_groups
from engine.model.spec import ForeignModel, UnsupportedModel
from engine.model.split import Part, SplitWeights, split_adapter
from engine.parallel.group import Group
from engine.pooling import DEFAULT_POOLING
from engine.staging import Staging
from engine.step_tensors import NO_SAMPLING, StepTensors, numbers_of
from engine.torch_storage import TorchStorage
from kernels.kv import KVLayout, Thinning
from kernels.quantised import TYPES, scale_bytes
from kernels.registry import get_kernels
from kernels.sampling import Sampled, SamplingBatch, TokenLogprobs

AnyDecoder = Decoder | ForeignDecoder

LEAST_ROWS = 16
"""Rows whose logits may stand side by side even if fewer sequences may run."""


class TorchModel:
    """`engine.batch.Model` with real weights. One thread at a time may call it."""

    def __init__(
        self,
        config: EngineConfig,
        decoder: AnyDecoder,
        info: ModelInfo,
        device: torch.device,
        group: Group | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """With a `group` it is one rank's part of the model, and only the first rank's tokens count."""
        self.info = info
        self._group = group
        self._adapter_step_bytes = step_bytes(decoder.spec, adapters, decoder.dtype.itemsize)
        self._config = config
        self._decoder: AnyDecoder | None = decoder
        self._spec = decoder.spec
        self._dtype = decoder.dtype
        self._device = device
        self._kv_dtype = TYPES.get(config.kv_cache_dtype, self._dtype)
        self._most_rows = max(LEAST_ROWS, config.max_num_seqs)
        self._staging = Staging(device)
        self._storage: TorchStorage | None = None
        self._kv: Sequence[Any] = ()

    @classmethod
    def load(cls, config: EngineConfig, files: ModelFiles | None = None, group: Group | None = None) -> Self:
        """Read, convert and pack the weights of the model that `config` names. `threads` holds for the process."""
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        files = files or open_files(config)
        device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, device)
        check_kv_dtype(config, device)
        adapters = open_adapters(config, files)
        decoder = load_decoder(config, files, dtype, device, group, adapters)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of what the weights were made from
        spec, text, kv_dtype = decoder.spec, files.text, TYPES.get(config.kv_cache_dtype, dtype)
        info = ModelInfo(
            revision=revision(config, files),
            device=str(device),
            dtype=str(dtype).removeprefix("torch.") if config.quantization == "none" else config.quantization,
            context_len=spec.context_len,
            vocab_size=min(text.vocab_size, spec.vocab_rows),
            kv_bytes_per_token=spec.kv_bytes_per_token(kv_dtype.itemsize, scale_bytes(kv_dtype)),
            text=text,
            pooling=files.pooling or DEFAULT_POOLING,
            reach_tokens=spec.reach_tokens,
            generates=files.generates,
            adapters={adapter.name: adapter.revision for adapter in adapters},
        )
        return cls(config, decoder, info, device, group, adapters)

    @property
    def cheap_rows(self) -> int:
        return 0  # the shapes of a product decide on the order of its sums

    @property
    def default_kv_bytes(self) -> int | None:
        return HOST_KV_BYTES if self._device.type == "cpu" else None

    def memory(self) -> DeviceMemory:
        if self._device.type != "cuda":
            return host_memory()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(total_bytes, total_bytes - free_bytes)

    def take_peak_bytes(self) -> int:
        if self._device.type != "cuda":
            return take_peak_bytes()
        above_now = torch.cuda.max_memory_reserved(self._device) - torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return self.memory().used_bytes + above_now

    def activation_bytes(self, tokens: int, rows: int) -> int:
        whole_bytes = self._spec.activation_bytes(tokens, rows, self._dtype.itemsize)
        return whole_bytes + tokens * self._adapter_step_bytes

    def kv_layout(self, page_size: int) -> KVLayout:
        spec, kv = self._spec, self._kv_dtype
        return KVLayout(spec.layers, spec.kv_heads, spec.head_size, kv.itemsize, page_size, scale_bytes(kv))

    def allocate_kv(self, layout: KVLayout, units: int, most_units: int) -> KVStorage:
        return self._allocate(layout, units, most_units, unused_page=False)

    def record(self) -> None:
        """Its steps aren't recorded: they are computed when they are called."""

    def _allocate(self, layout: KVLayout, units: int, most_units: int, *, unused_page: bool) -> KVStorage:
        decoder = self._open()
        if self._storage is not None:
            raise RuntimeError("the KV storage is allocated already")
        self._storage = TorchStorage(decoder.kernels, layout, units, most_units, self._device, unused_page=unused_page)
        self._kv = decoder.kernels.kv_views(self._storage.bytes, layout, decoder.dtype)
        return self._storage

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Sampled:
        decoder = self._open()
        with self._together(decoder, batch):
            step = self._upload(batch, NO_SAMPLING)
            hidden = decoder.hidden(step.token_ids, step.meta, self._kv, step.rows, step.adapted)
            return self._finish(decoder, hidden, batch)

    def _finish(self, decoder: AnyDecoder, hidden: Tensor, batch: Batch) -> Sampled:
        """What the host has to see of a step: the tokens, and all else that was asked of its rows [S, hidden]."""
        sampled = self._sample(decoder, hidden[: len(batch.sample_rows)], batch.sampling)
        return sampled._replace(pooled=_sums(hidden[len(batch.sample_rows) :], batch.pooled))

    def _together(self, decoder: AnyDecoder, batch: Batch) -> AbstractContextManager[None]:
        """A step of all ranks, if there are several."""
        if self._group is None or not isinstance(decoder, Decoder):
            return nullcontext()
        parts = [end - first for first, end in self._parts(len(batch.sample_rows))]
        return self._group.step(decoder.exchanges(len(batch.token_ids), parts))

    def _parts(self, rows: int) -> list[tuple[int, int]]:
        """First and end of rows whose logits stand side by side: few, as a scored prompt has many."""
        return [(first, min(first + self._most_rows, rows)) for first in range(0, rows, self._most_rows)]

    @torch.inference_mode()
    def thin(self, work: Thinning) -> None:
        if self._storage is None:
            raise RuntimeError("allocate_kv must be called before a context is thinned")
        self._open().kernels.thin(self._kv, self._storage.layout, work)

    def _sample(self, decoder: AnyDecoder, hidden: Tensor, sampling: SamplingBatch) -> Sampled:
        """Tokens of what the head reads, [S, hidden]."""
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for first, end in self._parts(len(hidden)):
            logits = decoder.logits(hidden[first:end])
            if self._group is not None and not self._group.is_first:
                continue
            sampled = decoder.kernels.sample(logits, sampling.part(first, end))
            tokens += sampled.tokens
            logprobs += sampled.logprobs or [None] * (end - first)
        return Sampled(tokens, logprobs if sampling.logprobs is not None else None)

    def release_kv(self) -> None:
        self._kv = ()
        if self._storage is not None:
            self._storage.close()
            self._storage = None

    def sleep(self) -> None:
        self._decoder = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        trim_heap()

    def wake(self) -> None:
        files, adapters = reopen(self._config, self.info)
        self._decoder = load_decoder(self._config, files, self._dtype, self._device, self._group, adapters)

    def close(self) -> None:
        self._decoder = None
        self.release_kv()

    def _open(self) -> AnyDecoder:
        if self._decoder is None:
            raise RuntimeError("the model is closed or asleep")
        return self._decoder

    def _stored(self) -> TorchStorage:
        if self._storage is None:
            raise RuntimeError("allocate_kv must be called before the first step")
        return self._storage

    def _upload(self, batch: Batch, sampling: SamplingBatch) -> StepTensors:
        """The step's numbers on the device; `sampling` is the batch's, or none if the host chooses."""
        parts = self._staging.send(numbers_of(batch, sampling, self.info.vocab_size, len(self.info.adapters)))
        max_query = max(b - a for a, b in itertools.pairwise(batch.query_start))
        return StepTensors.of(parts, max_query, max(batch.context_len), self._stored().layout)


def _sums(hidden: Tensor, pooled: Sequence[tuple[int, int]]) -> list[NDArray[np.float32]] | None:
    """The sums of the hidden states of each text's rows, which stand one after the other: [hidden] each."""
    if not pooled:
        return None
    parts = torch.split(hidden.float(), [end - first for first, end in pooled])
    return list(torch.stack([part.sum(0) for part in parts]).cpu().numpy())


@torch.inference_mode()
def load_decoder(
    config: EngineConfig,
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    group: Group | None = None,
    adapters: Sequence[Adapter] = (),
) -> AnyDecoder:
    """The weights in `files` and the adapters beside them, converted and packed for the device.

    Of several ranks, this one's.
    """
    kernels = get_kernels(device, TYPES.get(config.kv_cache_dtype), config.kernels)
    try:
        spec = spec_of(config, files)
    except ForeignModel as reason:
        if isinstance(files, GGUFFile):
            raise
        if config.ops:
            raise ValueError(f"no operation of {config.model} can be replaced: {reason}") from reason
        if group is not None:
            raise UnsupportedModel(f"{reason}; transformers' code serves it on one device alone") from reason
        if config.quantization != "none":
            raise UnsupportedModel(
                f"{reason}; transformers' code, which would serve it, takes its weights as they are: set quantization"
                " to none"
            ) from reason
        return load_foreign(config, files, reason, kernels, dtype, device)
    check_groups(spec, config.quantization, 1 if group is None else group.ranks)
    source, part, whole = open_weights(files, spec), None, spec
    if group is not None:
        part = Part(group.rank, group.ranks)
        spec, source = part.spec(whole), SplitWeights(source, whole, part)
        adapters = [split_adapter(adapter, whole, part) for adapter in adapters]
    weights = build_weights(
        spec,
        source,
        kernels,
        dtype=dtype,
        device=device,
        vocab_size=files.text.vocab_size,
        positions=min(spec.context_len, config.max_seq_len),
        ops=usable_ops(config.ops, spec, dtype, device),
        part=part,
        adapters=adapters,
        quantization=config.quantization,
    )
    return Decoder(spec, weights, kernels, dtype, group, min(files.text.vocab_size, whole.vocab_rows))


def check_ops(config: EngineConfig) -> None:
    """Raise ValueError if `config.ops` don't fit the model that it names; reads no weights."""
    if is_fake(config.model):
        raise ValueError("the fake model has no operations that could be replaced")
    if config.tensor_parallel_size > 1:
        raise ValueError("custom operations run on one device alone: they need tensor_parallel_size=1")
    try:
        spec = spec_of(config, open_files(config))
    except ForeignModel as reason:
        raise ValueError(f"no operation of {config.model} can be replaced: {reason}") from reason
    device = choose_device(config.device)
    usable_ops(config.ops, spec, choose_dtype(config.dtype, device), device)
