"""Steps that run behind the host's back: what is asked of a model that has them, and a thread that gives them to any.

A device does what it is told in the order in which it is told: steps, and whatever is done to pages between them. So
pages may change hands while a step that writes to them is under way: whoever gets them next comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from engine.batch import Batch, Model, NoNumbers
from engine.memory import Move
from engine.memory.machine import DeviceMemory
from engine.memory.storage import KVStorage
from kernels.kv import KVLayout, Thinning
from kernels.sampling import NO_TOKEN, Sampled

T = TypeVar("T")


class Launched(Protocol):
    """A step under way."""

    def wait(self) -> Sampled:
        """What it chose, once it is over. Raises what went wrong in it."""
        ...


@runtime_checkable
class LaunchingModel(Model, Protocol):
    """A model whose device works while the host goes on."""

    def launch(self, batch: Batch, before: Launched | None) -> Launched:
        """Begin a step behind all that was begun before.

        `before` is the last one, whose tokens `batch.carried` refers to. Raises if the step can't begin.
        """
        ...


def launching(model: Model, overlap: bool | str) -> LaunchingModel | None:
    """The model with steps that run behind the host's back, as `EngineConfig.overlap` wants it; None for without."""
    if isinstance(model, LaunchingModel):
        return model if overlap else None
    return ThreadedModel(model) if overlap is True else None


class _Task:
    """A step of `ThreadedModel`."""

    def __init__(self, future: Future[Sampled]) -> None:
        self.future = future

    def wait(self) -> Sampled:
        return self.future.result()


class ThreadedModel:
    """`LaunchingModel` of a model that computes when it is called: a thread of its own is the device.

    Only `memory` and `take_peak_bytes` are asked past that thread: they change nothing.
    """

    def __init__(self, model: Model) -> None:
        self.info = model.info
        self.cheap_rows = model.cheap_rows
        self.default_kv_bytes = model.default_kv_bytes
        self._model = model
        self._device = ThreadPoolExecutor(1, thread_name_prefix="model-device")

    def launch(self, batch: Batch, before: Launched | None) -> Launched:
        assert before is None or isinstance(before, _Task)
        return _Task(self._device.submit(self._run, batch, before))

    def execute(self, batch: Batch) -> Sampled:
        return self.launch(batch, None).wait()

    def memory(self) -> DeviceMemory:
        return self._model.memory()

    def take_peak_bytes(self) -> int:
        return self._model.take_peak_bytes()

    def activation_bytes(self, tokens: int, rows: int) -> int:
        return self._model.activation_bytes(tokens, rows)

    def kv_layout(self, page_size: int) -> KVLayout:
        return self._model.kv_layout(page_size)

    def allocate_kv(self, layout: KVLayout, units: int, most_units: int) -> KVStorage:
        return _QueuedStorage(self._do(lambda: self._model.allocate_kv(layout, units, most_units)), self._do)

    def record(self) -> None:
        self._do(self._model.record)

    def release_kv(self) -> None:
        self._do(self._model.release_kv)

    def sleep(self) -> None:
        self._do(self._model.sleep)

    def wake(self) -> None:
        self._do(self._model.wake)

    def thin(self, work: Thinning) -> None:
        self._do(lambda: self._model.thin(work))

    def close(self) -> None:
        """Let what is under way end, and release the model; a second call does nothing."""
        self._device.shutdown()
        self._model.close()

    def _run(self, batch: Batch, before: _Task | None) -> Sampled:
        """Nothing is computed behind a step that failed: what it should have written is missing."""
        chosen = [] if before is None else before.future.result().tokens
        if batch.carried:
            token_ids = list(batch.token_ids)
            for at, row in batch.carried:
                if chosen[row] == NO_TOKEN:
                    raise NoNumbers
                token_ids[at] = chosen[row]
            batch = replace(batch, token_ids=token_ids)
        return self._model.execute(batch)

    def _do(self, work: Callable[[], T]) -> T:
        return self._device.submit(work).result()


class _QueuedStorage:
    """`KVStorage` that the device's thread touches."""

    def __init__(self, storage: KVStorage, do: Callable[[Callable[[], Any]], Any]) -> None:
        self.layout = storage.layout
        self.units = storage.units
        self._storage = storage
        self._do = do

    def copy_pages(self, moves: Sequence[Move]) -> None:
        if moves:
            self._do(lambda: self._storage.copy_pages(moves))

    def save_pages(self, pages: Sequence[int]) -> Any:
        return self._do(lambda: self._storage.save_pages(pages))

    def load_pages(self, saved: Any, pages: Sequence[int]) -> None:
        self._do(lambda: self._storage.load_pages(saved, pages))

    def decommit(self, runs: Iterable[tuple[int, int]]) -> None:
        listed = list(runs)
        if listed:
            self._do(lambda: self._storage.decommit(listed))

    def close(self) -> None:
        self._do(self._storage.close)
