"""What an engine on a thread of its own is asked, and what it tells."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from engine.request import EngineRequest, RequestOutput, SamplingParams, TokenDelta
from engine.thread import EngineThread

Make = Callable[..., EngineThread]


class Recorder:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.order: list[tuple[str, str]] = []
        self.texts: dict[str, str] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.threads: set[str] = set()
        self._changed = threading.Condition()

    def on_admitted(self, request_id: str, admitted_s: float) -> None:
        self._note("admitted", request_id)

    def on_tokens(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            self.texts[delta.request_id] = self.texts.get(delta.request_id, "") + delta.text
            self._note("tokens", delta.request_id)

    def on_finished(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.outputs
            self.outputs[output.request_id] = output
            self._note("finished", output.request_id)

    def _note(self, event: str, request_id: str) -> None:
        with self._changed:
            self.threads.add(threading.current_thread().name)
            self.order.append((event, request_id))
            self._changed.notify_all()

    def wait(self, reached: Callable[[], bool], timeout_s: float = 20) -> None:
        with self._changed:
            assert self._changed.wait_for(reached, timeout_s), f"seen so far: {self.order[-20:]}"

    def wait_for(self, *ids: str) -> list[RequestOutput]:
        self.wait(lambda: set(ids) <= set(self.outputs))
        return [self.outputs[request_id] for request_id in ids]

    def wait_tokens(self, request_id: str) -> None:
        self.wait(lambda: ("tokens", request_id) in self.order)


def request(id: str, prompt: str = "a prompt", max_tokens: int = 6, **fields: Any) -> EngineRequest:  # noqa: A002
    return EngineRequest(id, SamplingParams(max_tokens=max_tokens), prompt=prompt, **fields)
