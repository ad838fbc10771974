"""The model on the CPU: batches of plain integers in, token ids out, through the compiled library and without torch."""

from __future__ import annotations

import logging
import time
from typing import Self

from engine.batch import HOST_KV_BYTES, Batch, ModelInfo
from engine.config import EngineConfig
from engine.cpu.cores import usable_cores
from engine.cpu.loading import Loader, heads_of
from engine.cpu.recipe import unserved
from engine.memory.arena import Arena
from engine.memory.machine import DeviceMemory, host_memory, take_peak_bytes, trim_heap
from engine.memory.storage import HostStorage, KVStorage
from engine.model import ModelFiles, open_adapters, open_files, reopen, revision, spec_of
from engine.model.spec import ModelSpec
from kernels.cpu.layers import PAGE_TOKENS
from kernels.cpu.library import Library, Team, Unavailable, load
from kernels.cpu.step import DecoderModel, ModelStep, StepWork, step_bytes
from kernels.cpu.thinning import thin
from kernels.kv import KVLayout, Thinning
from kernels.sampling import Sampled

logger = logging.getLogger(__name__)


def obstacle(config: EngineConfig, spec: ModelSpec) -> str | None:
    """Why the library can't serve this model in this configuration; None if it can."""
    if config.tensor_parallel_size > 1:
        return f"it isn't divided, and tensor_parallel_size is {config.tensor_parallel_size}"
    if config.embeddings:
        return "it makes no embeddings"
    if config.ops:
        return "its operations can't be replaced"
    if config.kernels != "auto":
        return f"its operations are its own, and kernels is {config.kernels}"
    if config.quantization == "int4":
        return "it has 4 bits as the blocks of a GGUF file alone (quantization=gguf)"
    if config.dtype == "float16":
        return "it computes in bfloat16 or float32, and float16 is asked for"
    if config.page_size % PAGE_TOKENS:
        return f"its pages hold a multiple of {PAGE_TOKENS} tokens, and page_size is {config.page_size}"
    try:
        load()
    except Unavailable as unavailable:
        return str(unavailable)
    return unserved(spec)


CHEAP_ROWS = 4
"""So many rows are multiplied while their weights come from memory."""


class CpuModel:
    """`engine.batch.Model` over the compiled library. One thread at a time may call it."""

    def __init__(self, config: EngineConfig, model: DecoderModel, team: Team, info: ModelInfo, dtype: str) -> None:
        """`dtype` is that of what isn't quantised."""
        self.info = info
        self._config = config
        self._dtype = dtype
        self._team = team
        self._model: DecoderModel | None = model
        self._step: ModelStep | None = None
        self._storage: HostStorage | None = None

    @classmethod
    def load(cls, config: EngineConfig, files: ModelFiles | None = None) -> Self:
        """Read the weights that `config` names, packed before or now."""
        began_s = time.monotonic()
        library = load()
        files = files or open_files(config)
        spec, text, adapters = spec_of(config, files), files.text, open_adapters(config, files)
        dtype = choose_dtype(config.dtype, library)
        heads = heads_of(config, spec, dtype)
        info = ModelInfo(
            revision=revision(config, files),
            device="cpu",
            dtype=dtype if config.quantization == "none" else config.quantization,
            context_len=spec.context_len,
            vocab_size=min(text.vocab_size, spec.vocab_rows),
            kv_bytes_per_token=spec.kv_bytes_per_token(heads.number_bytes, heads.scale_bytes),
            text=text,
            reach_tokens=spec.reach_tokens,
            adapters={adapter.name: adapter.revision for adapter in adapters},
        )
        team = Team(library, config.threads or usable_cores())
        model = Loader(config, files, info, dtype, adapters).load(team)
        logger.info(
            "%s: weights as %s for %d threads of %s in %.1f s",
            config.model, info.dtype, team.threads, library.isa, time.monotonic() - began_s,
        )  # fmt: skip
        return cls(config, model, team, info, dtype)

    @property
    def cheap_rows(self) -> int:
        return CHEAP_ROWS

    @property
    def default_kv_bytes(self) -> int | None:
        return HOST_KV_BYTES

    def memory(self) -> DeviceMemory:
        return host_memory()

    def take_peak_bytes(self) -> int:
        return take_peak_bytes()

    def activation_bytes(self, tokens: int, rows: int) -> int:
        return step_bytes(self._open(), self._team.threads, tokens, rows)

    def kv_layout(self, page_size: int) -> KVLayout:
        model = self._open()
        heads = model.heads
        return KVLayout(
            len(model.layers), heads.kv_heads, heads.head_size, heads.number_bytes, page_size, heads.scale_bytes
        )

    def allocate_kv(self, layout: KVLayout, units: int, most_units: int) -> KVStorage:
        model = self._open()
        if self._storage is not None:
            raise RuntimeError("the KV storage is allocated already")
        self._storage = HostStorage(Arena.reserve(units, most_units), layout)
        self._step = ModelStep(self._team, model, layout, self._config.max_num_batched_tokens)
        return self._storage

    def record(self) -> None:
        """A step is one call already."""

    def phase_seconds(self) -> dict[str, float]:
        """Time of one thread in each phase of the steps since the last call; the first call starts the counting."""
        if self._step is None:
            raise RuntimeError("allocate_kv must be called before the first step")
        return self._step.seconds()

    def release_kv(self) -> None:
        if self._step is not None:
            self._step.close()
            self._step = None
        if self._storage is not None:
            self._storage.close()
            self._storage = None

    def sleep(self) -> None:
        self._model = None
        if self._step is not None:
            self._step.close()
            self._step = None
        trim_heap()

    def wake(self) -> None:
        files, adapters = reopen(self._config, self.info)
        self._model = Loader(self._config, files, self.info, self._dtype, adapters).load(self._team)
        if self._storage is not None:
            self._step = ModelStep(self._team, self._model, self._storage.layout, self._config.max_num_batched_tokens)

    def execute(self, batch: Batch) -> Sampled:
        self._open()
        if self._step is None or self._storage is None:
            raise RuntimeError("allocate_kv must be called before the first step")
        work = StepWork(
            batch.token_ids,
            batch.query_start,
            batch.context_len,
            batch.block_tables,
            batch.sample_rows,
            batch.evicted,
            batch.adapters,
        )
        return self._step.run(work, batch.sampling, self._storage.arena.address)

    def thin(self, work: Thinning) -> None:
        if self._storage is None:
            raise RuntimeError("allocate_kv must be called before a context is thinned")
        thin(self._team, self._open().heads, self._storage.layout, self._storage.arena.bytes, work)

    def close(self) -> None:
        self._model = None
        self.release_kv()
        self._team.close()

    def _open(self) -> DecoderModel:
        if self._model is None:
            raise RuntimeError("the model is closed or asleep")
        return self._model


def choose_dtype(name: str, library: Library) -> str:
    """`auto` is bfloat16 where the processor multiplies it natively, else float32."""
    if name == "auto":
        return "bfloat16" if library.isa in ("amx", "avx512") else "float32"
    return name
