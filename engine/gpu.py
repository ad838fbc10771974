"""The model on a GPU: steps that are launched and run behind the host's back, those of one token a request recorded."""

from __future__ import annotations

import logging
from typing import Any, Self

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import EngineConfig
from engine.decode_graphs import MOST_CONTEXT_TOKENS, RECORDING_BYTES, DecodeGraphs, kinds_of, sizes_up_to
from engine.devices import check_max_num_seqs, choose_device
from engine.executor import is_out_of_memory
from engine.launching import Launched
from engine.memory.machine import DeviceMemory
from engine.memory.storage import KVStorage
from engine.model import ModelFiles
from engine.model.decoder import Decoder
from engine.parallel.group import Group
from engine.recording import CudaRecorder, Recorder
from engine.runner import TorchModel
from engine.staging import Fence, Staging, fences
from engine.step_tensors import NO_SAMPLING, StepTensors
from kernels.columns import chosen_by_columns
from kernels.kv import KVLayout
from kernels.sampling import Sampled

log = logging.getLogger(__name__)


class GpuModel(TorchModel):
    """`engine.launching.LaunchingModel` with real weights. What it is told, the device does in that order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._staging = Staging(self._device)
        self._recorder: Recorder | None = None
        self._graphs: DecodeGraphs | None = None

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        files: ModelFiles | None = None,
        group: Group | None = None,
        recorder: Recorder | None = None,
    ) -> Self:
        """As `TorchModel.load`. Steps are recorded by CUDA graphs, where the model can be, or by `recorder`.

        Raises ValueError for more sequences than the device has any use for.
        """
        device = choose_device(config.device)
        check_max_num_seqs(config.max_num_seqs, device)
        model = super().load(config, files, group)
        obstacle = model._obstacle()
        if recorder is None and obstacle is None:
            recorder = CudaRecorder(device)
        elif recorder is None:
            log.info("no step is recorded: %s", obstacle)
        model._recorder = recorder
        return model

    def memory(self) -> DeviceMemory:
        """What recordings will need counts as used until they are there."""
        memory = super().memory()
        return memory._replace(used_bytes=memory.used_bytes + self._recordings_bytes())

    def allocate_kv(self, layout: KVLayout, units: int, most_units: int) -> KVStorage:
        return self._allocate(layout, units, most_units, unused_page=self._recorder is not None)

    def record(self) -> None:
        if self._recorder is None:
            return
        decoder, storage = self._open(), self._stored()
        graphs = DecodeGraphs(
            self._staging,
            self.info.vocab_size,
            storage.layout,
            storage.unused_page,
            self._most_context,
            len(self.info.adapters),
        )

        def compute(step: StepTensors) -> tuple[Tensor, Tensor]:
            logits = decoder.logits(decoder.hidden(step.token_ids, step.meta, self._kv, step.rows, step.adapted))
            return logits, decoder.kernels.choose(logits, step.columns)

        try:
            with torch.inference_mode():
                sizes = sizes_up_to(self._config.max_num_seqs)
                graphs.record(sizes, self._recorder, compute, lambda: self._stored().bytes)
        except Exception as error:
            if not _is_short_of_memory(error):
                raise
            log.warning("there is no memory to record steps, so they are launched one by one: %s", error)
            self._recorder = None
            return
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, batch: Batch, before: Launched | None) -> Launched:
        decoder = self._open()
        chosen_before = None
        if batch.carried:
            assert isinstance(before, _Step)
            chosen_before = before.chosen
        decode = self._graphs.fitting(batch) if self._graphs is not None else None
        by_columns = chosen_by_columns(batch.sampling) and not batch.pooled
        if decode is not None and self._graphs is not None:
            logits, chosen = self._graphs.run(decode, batch, chosen_before)
            if by_columns:
                return _Step(chosen.clone(), fences(self._device)())
            return self._told(decoder.kernels.sample(logits, batch.sampling))
        step = self._upload(batch, batch.sampling if by_columns else NO_SAMPLING)
        if chosen_before is not None:
            step.take(chosen_before)
        hidden = decoder.hidden(step.token_ids, step.meta, self._kv, step.rows, step.adapted)
        if by_columns:
            return _Step(decoder.kernels.choose(decoder.logits(hidden), step.columns), fences(self._device)())
        return self._told(self._finish(decoder, hidden, batch))

    def execute(self, batch: Batch) -> Sampled:
        return self.launch(batch, None).wait()

    def release_kv(self) -> None:
        self._graphs = None
        super().release_kv()

    def sleep(self) -> None:
        self._graphs = None
        super().sleep()

    def _told(self, sampled: Sampled) -> Launched:
        """A step whose tokens the host has chosen already."""
        return _Step(torch.tensor(sampled.tokens, dtype=torch.int32).to(self._device), None, sampled)

    def _obstacle(self) -> str | None:
        """Why no step can be recorded; None if it can."""
        decoder = self._open()
        if self._config.enforce_eager:
            return "enforce_eager is set"
        if not decoder.kernels.stays_on_device:
            return f"the kernels ({decoder.kernels.name}) look at the step on the host"
        if not isinstance(decoder, Decoder):
            return "the model is computed by transformers' code"
        if decoder.spec.experts:
            return "the experts of a token are chosen on the host"
        if self._config.ops:
            return "nobody knows what the custom operations do on the host"
        return None

    @property
    def _most_context(self) -> int:
        return min(self._config.max_seq_len, self.info.context_len, MOST_CONTEXT_TOKENS)

    def _recordings_bytes(self) -> int:
        """What the recordings that are still to be made will need: activations that they share, and what each has."""
        if self._recorder is None or self._graphs is not None:
            return 0
        sizes, kinds = sizes_up_to(self._config.max_num_seqs), kinds_of(len(self.info.adapters))
        unused_bytes = self.kv_layout(self._config.page_size).extent_bytes
        return self.activation_bytes(sizes[-1], sizes[-1]) + len(sizes) * len(kinds) * RECORDING_BYTES + unused_bytes


class _Step:
    """A step that the device does by itself, or one whose tokens the host chose at its launch."""

    def __init__(self, chosen: Tensor, fence: Fence | None, sampled: Sampled | None = None) -> None:
        """`chosen` [S] int32, on the device."""
        self.chosen = chosen
        self._fence = fence
        self._sampled = sampled
        if fence is not None:
            self._host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=chosen.is_cuda)
            self._host.copy_(chosen, non_blocking=True)
            fence.set()

    def wait(self) -> Sampled:
        if self._sampled is None:
            assert self._fence is not None
            self._fence.wait()
            self._sampled = Sampled(self._host.tolist())
        return self._sampled


def _is_short_of_memory(error: BaseException | None) -> bool:
    """Whether memory was short when something was recorded: ending the recording then fails for another reason."""
    while error is not None:
        if is_out_of_memory(error):
            return True
        error = error.__context__
    return False
