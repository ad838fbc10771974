"""Offline inference: prompts in, outputs out, in one process."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model import load_model
from engine.request import EngineRequest, RequestOutput, SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, str]
AdapterName = str | Sequence[str | None] | None
Progress = Callable[[int, int], None]
"""Called with the requests finished and their total."""


class LLM:
    """A resident model. Close it, or use it as a context manager.

    Threads may share it: one call runs after the other. A process that was forked from the one that made it can't
    use it, because the threads that compute aren't there.
    """

    def __init__(self, model: str | Path, cache: str | Path | None = None, **config: Any) -> None:
        """`config` takes the other fields of `EngineConfig`. `prefill_share` is 1 here unless it is given: nobody reads
        along, so no cap on prompts has to keep the time between two tokens even."""
        config = {"prefill_share": 1.0, **config}
        self.config = EngineConfig(str(model), None if cache is None else Path(cache), **config)
        self._engine = Engine(load_model(self.config), self.config)
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._busy = False
        self._process_id = os.getpid()
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Progress | None = None,
        adapter: AdapterName = None,
    ) -> list[RequestOutput]:
        """The outputs of one or many prompts (text or token ids), in their order.

        `adapter` names one of the model's adapters for all of them, or one or None for each.
        Raises `RequestRefused` before anything runs if one of them can't run. One that fails while it
        runs has the finish reason `error`.
        """
        return self._run([{"prompt": prompt} for prompt in _listed(prompts)], params, progress, adapter)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Progress | None = None,
        adapter: AdapterName = None,
    ) -> list[RequestOutput]:
        """The answers to one chat or many, each a list of `{"role", "content"}`."""
        chats: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        return self._run([{"messages": tuple(map(dict, chat))} for chat in chats], params, progress, adapter)

    def embed(
        self, texts: Prompt | Sequence[Prompt], progress: Progress | None = None, adapter: AdapterName = None
    ) -> list[RequestOutput]:
        """The outputs of one or many texts (or their token ids), in their order, each with its `embedding`.

        The vector is made as the model's directory says (`docs/models.md`); without a word, of the last token.
        """
        nothing = SamplingParams(max_tokens=0)
        return self._run([{"prompt": text, "embeds": True} for text in _listed(texts)], nothing, progress, adapter)

    def register_op(self, name: str, op: Callable[..., Any]) -> None:
        """Put an operation, as a `kernels.custom.CustomOp`, in the place of the built-in one of that name.

        Loads the model again, by torch: what was computed with the other operation is dropped. `LLM(..., ops={name:
        op})` does so from the start. Raises ValueError, and changes nothing, if the operation doesn't fit; one that
        can't run on this device leaves the built-in one in its place, with a warning. A model that can't be loaded
        again stays closed.
        """
        from engine.runner import check_ops

        config = replace(self.config, ops={**self.config.ops, name: op})
        with self._alone():
            check_ops(config)
            self._engine.close()
            self._closed = True  # unless the model can be had again
            self._engine = Engine(load_model(config), config)
            self.config, self._closed = config, False

    def sleep(self) -> None:
        """Give the memory of weights and KV back until `wake`; nothing can be generated meanwhile."""
        with self._alone():
            self._engine.sleep()

    def wake(self) -> None:
        """Load the same weights again."""
        with self._alone():
            self._engine.wake()

    def close(self) -> None:
        """Release the model; nothing can be generated afterwards."""
        if self._closed or os.getpid() != self._process_id:
            return
        with self._alone():
            self._closed = True
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        inputs: list[dict[str, Any]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: Progress | None,
        adapter: AdapterName,
    ) -> list[RequestOutput]:
        names = [adapter] * len(inputs) if adapter is None or isinstance(adapter, str) else list(adapter)
        if len(names) != len(inputs):
            raise ValueError(f"{len(inputs)} prompts need as many adapters, got {len(names)}")
        each = [params or SamplingParams()] * len(inputs) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(inputs):
            raise ValueError(f"{len(inputs)} prompts need as many sampling parameters, got {len(each)}")
        requests = [
            EngineRequest(id=str(next(self._ids)), params=own, adapter=name, **given)
            for given, own, name in zip(inputs, each, names, strict=True)
        ]
        with self._alone():
            outputs = self._finish(requests, progress)
        return [outputs[request.id] for request in requests]

    def _finish(self, requests: Sequence[EngineRequest], progress: Progress | None) -> dict[str, RequestOutput]:
        """Step until all requests have ended; if anything is raised, the engine is empty as before."""
        outputs: dict[str, RequestOutput] = {}
        if self._engine.asleep:
            raise RuntimeError("the model sleeps: wake it first")
        try:
            for request in requests:
                self._engine.add(request)
            while self._engine.has_work:
                for output in self._engine.step().finished:
                    outputs[output.request_id] = output
                    if progress is not None:
                        progress(len(outputs), len(requests))
        except BaseException:
            self._engine.abort_all()
            self._engine.report()
            raise
        return outputs

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Have the engine for oneself. Raises RuntimeError if it can't be used any more, or not in this process."""
        if os.getpid() != self._process_id:
            raise RuntimeError(
                "the model was loaded before this process was forked: load it in the process that uses it"
            )
        with self._lock:
            if self._closed:
                raise RuntimeError("the model is closed")
            if self._busy:
                raise RuntimeError("the model is in use: a progress callback can't use it")
            self._busy = True
            try:
                yield
            finally:
                self._busy = False


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[str | tuple[int, ...]]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [cast("Prompt", prompts)]
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in cast("Sequence[Prompt]", prompts)]
