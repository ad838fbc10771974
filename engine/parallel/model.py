"""A model over several devices: the first rank's part is here, the others' in processes of their own."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.cpu.cores import usable_cores
from engine.devices import check_max_num_seqs
from engine.executor import ModelFailed
from engine.memory.machine import DeviceMemory
from engine.memory.storage import KVStorage
from engine.model import ModelFiles, open_files, spec_of
from engine.model.device import is_cpu
from engine.model.quantised import check_groups
from engine.model.spec import ForeignModel, UnsupportedModel
from engine.model.split import check_divisible
from engine.parallel.group import Group
from engine.parallel.ranks import RankLost, Ranks
from engine.parallel.storage import ParallelStorage
from engine.runner import TorchModel
from kernels.kv import KVLayout, Thinning
from kernels.sampling import Sampled, SamplingBatch

T = TypeVar("T")
log = logging.getLogger(__name__)

NOTHING_SAMPLED = SamplingBatch((), (), (), (), (), (), ())
"""What the other ranks are told of sampling."""


class ParallelModel:
    """`engine.batch.Model`, and `engine.batch.Perishable`: its ranks are lost together.

    The first rank plans, samples and is asked; the others do as it does. What one of them raises is raised here once
    all have come to the end of what they did, so that they stay in step.
    """

    def __init__(self, own: TorchModel, ranks: Ranks, config: EngineConfig) -> None:
        self._own = own
        self._ranks = ranks
        self._config = config
        self._on_cpu = own.info.device == "cpu"
        self._used_bytes: list[int] = []
        """Of each rank when it was last asked."""
        self._numbers = count()
        """Of what is saved; no storage begins again, because what is saved outlives it."""
        self._forgotten: list[int] = []
        self._turn = threading.Lock()
        """Memory may be asked for while a step runs."""
        self.info = replace(own.info, device=f"{own.info.device} x {config.tensor_parallel_size}")

    @classmethod
    def load(cls, config: EngineConfig, files: ModelFiles | None = None) -> Self:
        """Start the other ranks, and load every rank's part. What can't be divided is refused before."""
        files = files or open_files(config)
        check(config, files)
        size = config.tensor_parallel_size
        ranks = Ranks(size - 1, config.patience_s)
        try:
            configs = [_rank_config(config, rank) for rank in range(size)]
            group = _meet(ranks, configs)
            ranks.on_loss(lambda _: group.abandon())
            ranks.call_each("load", [(own,) for own in configs[1:]])
            try:
                own = TorchModel.load(configs[0], files, group)
            finally:
                answers = ranks.answers(patient=True)
            for rank, answer in enumerate(answers, 1):
                if answer.check(rank) != own.info.revision:
                    raise RuntimeError(f"the files of {config.model} changed while they were read")
        except BaseException:
            ranks.close()
            raise
        log.info("%s: divided among %d ranks, processes %s", config.model, size, ranks.process_ids)
        return cls(own, ranks, config)

    @property
    def process_ids(self) -> list[int]:
        """Of all ranks but the first."""
        return self._ranks.process_ids

    @property
    def cheap_rows(self) -> int:
        return self._own.cheap_rows

    @property
    def default_kv_bytes(self) -> int | None:
        return self._own.default_kv_bytes

    def on_loss(self, call: Callable[[str], None]) -> None:
        self._ranks.on_loss(call)

    def memory(self) -> DeviceMemory:
        """Of the rank that has least left. Ranks on the host share what it has free."""
        found = [self._share(memory) for memory in self._asked(self._own.memory, "memory")]
        self._used_bytes = [memory.used_bytes for memory in found]
        share = self._config.gpu_memory_utilization
        return min(found, key=lambda memory: share * memory.total_bytes - memory.used_bytes)

    def take_peak_bytes(self) -> int:
        """What the most growing rank has had, above what `memory` says is in use."""
        peaks = self._asked(self._own.take_peak_bytes, "take_peak_bytes")
        grown = [peak - used for peak, used in zip(peaks, self._used_bytes, strict=False)]
        return self.memory().used_bytes + max(grown, default=0)

    def activation_bytes(self, tokens: int, rows: int) -> int:
        return self._own.activation_bytes(tokens, rows)

    def kv_layout(self, page_size: int) -> KVLayout:
        """That of each rank: a page holds its share of the heads."""
        return self._own.kv_layout(page_size)

    def allocate_kv(self, layout: KVLayout, units: int, most_units: int) -> KVStorage:
        def own() -> KVStorage:
            return self._own.allocate_kv(layout, units, most_units)

        storage = self._everywhere(own, "allocate_kv", layout, units, most_units)
        return ParallelStorage(storage, self._everywhere, self._numbers, self._forgotten)

    def record(self) -> None:
        """No rank records its steps: what they exchange would have to be recorded by all at once."""

    def release_kv(self) -> None:
        self._everywhere(self._own.release_kv, "release_kv")

    def sleep(self) -> None:
        self._everywhere(self._own.sleep, "sleep")

    def wake(self) -> None:
        try:
            self._everywhere(self._own.wake, "wake", patient=True)
        except ModelFailed:
            raise
        except Exception:
            self.sleep()
            raise

    def execute(self, batch: Batch) -> Sampled:
        forgotten = self._forgotten.copy()
        del self._forgotten[: len(forgotten)]
        told = replace(batch, sampling=NOTHING_SAMPLED, known_tokens=[])
        return self._everywhere(lambda: self._own.execute(batch), "execute", told, forgotten)

    def thin(self, work: Thinning) -> None:
        """Every head chooses for itself, so every rank does."""
        self._everywhere(lambda: self._own.thin(work), "thin", work)

    def close(self) -> None:
        self._own.close()
        self._ranks.close()

    def _everywhere(self, own: Callable[[], T], name: str, *arguments: Any, patient: bool = False) -> T:
        """Have all ranks do something; what the first one's part gives. Raises ModelFailed if a rank is lost."""
        return self._asked(own, name, *arguments, patient=patient)[0]

    def _asked(self, own: Callable[[], T], name: str, *arguments: Any, patient: bool = False) -> list[T]:
        """The same; what each rank's part gives."""
        with self._turn:
            self._ranks.call(name, *arguments)
            try:
                first = own()
            except RankLost as error:
                self._ranks.lose(str(error))
                raise
            except BaseException:
                self._ranks.answers(patient)
                raise
            answers = self._ranks.answers(patient)
        return [first, *(answer.check(rank) for rank, answer in enumerate(answers, 1))]

    def _share(self, memory: DeviceMemory) -> DeviceMemory:
        if not self._on_cpu:
            return memory
        free_bytes = memory.free_bytes // self._config.tensor_parallel_size
        return DeviceMemory(memory.used_bytes + free_bytes, memory.used_bytes)


def check(config: EngineConfig, files: ModelFiles) -> None:
    """Raise ValueError, UnsupportedModel among them, if the model can't be divided as `config` asks."""
    size = config.tensor_parallel_size
    try:
        spec = spec_of(config, files)
        check_divisible(spec, size)
        check_groups(spec, config.quantization, size)
    except ForeignModel as reason:
        raise UnsupportedModel(f"{reason}; transformers' code serves it on one device alone") from reason
    if config.ops:
        raise ValueError("custom operations run on one device alone: they need tensor_parallel_size=1")
    if is_cpu(config.device):
        return
    if config.device not in ("auto", "cuda"):
        raise ValueError(
            f"device={config.device!r} names one device, and tensor_parallel_size={size} takes several:"
            " say cuda, and choose them by CUDA_VISIBLE_DEVICES"
        )
    if torch.cuda.device_count() < size:
        raise ValueError(f"tensor_parallel_size={size} takes as many GPUs, and there are {torch.cuda.device_count()}")
    for rank in range(size):
        check_max_num_seqs(config.max_num_seqs, torch.device("cuda", rank))


def _rank_config(config: EngineConfig, rank: int) -> EngineConfig:
    """A rank's own device, or its share of the cores."""
    if not is_cpu(config.device):
        return replace(config, device=f"cuda:{rank}")
    threads = (config.threads or usable_cores()) // config.tensor_parallel_size
    return replace(config, device="cpu", threads=max(1, threads))


def _meet(ranks: Ranks, configs: list[EngineConfig]) -> Group:
    """Bring all ranks together, over a file that nobody else sees and that is gone when they are."""
    place = Path(tempfile.mkdtemp(prefix="headrace-ranks-"))
    try:
        meeting, size = place / "meeting", len(configs)
        patience_s = configs[0].patience_s
        ranks.call_each("join", [(meeting, size, own.device, patience_s) for own in configs[1:]])
        group = Group.join(meeting, 0, size, torch.device(configs[0].device), patience_s)
        for rank, answer in enumerate(ranks.answers(patient=True), 1):
            answer.check(rank)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return group
