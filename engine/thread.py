"""The engine on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from engine.arrivals import Arrivals, Work
from engine.batch import Model, Perishable
from engine.choices import Choices
from engine.config import EngineConfig
from engine.contract import EngineListener, EngineStats
from engine.engine import Engine
from engine.executor import ModelFailed
from engine.reports import StepResult
from engine.request import EngineRequest, RequestOutput, RequestRefused
from engine.roster import ENGINE_ERROR

log = logging.getLogger(__name__)

TOGETHER_S = 0.002
"""An engine that is woken waits this long if more is on its way: it then has all of it in its first step."""


class EngineThread:
    """Fulfils `engine.contract.EngineHost`.

    One thread steps; others tokenise and compile grammars (`Arrivals`), so that neither stalls anybody's tokens.
    Everything that other threads ask for goes through an inbox that is emptied between two steps.
    """

    def __init__(self, model: Model, config: EngineConfig, listener: EngineListener) -> None:
        self._engine = Engine(model, config)
        self._listener = listener
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._inbox: deque[Work] = deque()
        self._arrivals = Arrivals(self._prepare, self._engine.compiles, self._post)
        self._live: set[str] = set()
        self._stopping = False
        self._closed = False
        self._failure: str | None = None
        self._stats = self._engine.stats()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        if isinstance(model, Perishable):
            model.on_loss(self._lose)

    @property
    def healthy(self) -> bool:
        """False once the loop has failed, and before the failed requests are reported."""
        return self._failure is None

    @property
    def max_seq_len(self) -> int:
        return self._engine.max_seq_len

    def start(self) -> None:
        self._thread.start()
        self._arrivals.start()

    def submit(self, request: EngineRequest) -> None:
        """Take a request from any thread; see `EngineHost.submit`. An id that is live already is the caller's fault."""
        with self._lock:
            if self._stopping:
                raise RuntimeError("the engine is stopping")
            if request.id in self._live:
                raise ValueError(f"request {request.id} is in the engine already")
            self._live.add(request.id)
            self._arrivals.put(request, time.monotonic())

    def abort(self, request_id: str) -> None:
        early = self._arrivals.take_back(request_id)
        if early is None:
            self._post(lambda: self._engine.abort(request_id))
        else:
            self._post(lambda: self._finish([self._engine.aborted(*early)]))

    def set_max_num_seqs(self, n: int) -> None:
        self._post(lambda: self._engine.set_max_num_seqs(n))

    def set_kv_bytes(self, kv_bytes: int) -> Future[None]:
        return self._ask(lambda: self._engine.set_kv_bytes(kv_bytes))

    def sleep(self) -> Future[None]:
        return self._ask(self._engine.sleep)

    def wake(self) -> Future[None]:
        return self._ask(self._engine.wake)

    def stats(self) -> EngineStats:
        stats = self._stats
        return replace(stats, waiting=max(0, len(self._live) - stats.running), failure=self._failure)

    def check(self) -> None:
        self._ask(self._engine.check).result()

    def stop(self) -> None:
        with self._lock:
            stopped, self._stopping = self._stopping, True
        if stopped:
            return
        self._wake.set()
        if self._thread.ident is None:
            self._close()
        else:
            self._arrivals.stop()
            self._thread.join()
        self._engine.close()

    def _ask(self, work: Callable[[], None]) -> Future[None]:
        """Have something done between two steps; on the calling thread if the engine's own doesn't run."""
        done: Future[None] = Future()

        def answer() -> None:
            try:
                work()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._lock:
            running = self._thread.is_alive() and not self._closed
            if running:
                self._post(answer)
        if not running:
            if self._thread.is_alive():
                self._thread.join()
            answer()
        return done

    def _post(self, work: Work) -> None:
        self._inbox.append(work)
        self._wake.set()

    def _prepare(self, request: EngineRequest, arrived_s: float) -> Work:
        """Do the slow part of taking a request; what is left is for the engine's thread."""
        try:
            choices = self._engine.prepare(request, arrived_s)
        except RequestRefused as error:
            refused = error
        except BaseException as error:  # a panic in the tokenizer's native code is no Exception
            log.exception("request %s can't be prepared", request.id)
            refused = RequestRefused(ENGINE_ERROR, f"{type(error).__name__}: {error}")
        else:
            return lambda: self._enter(request, choices)
        return lambda: self._refuse(request, refused, arrived_s)

    def _loop(self) -> None:
        while not self._stopping:
            self._wake.clear()
            try:
                idle = not self._turn()
            except Exception as error:
                self._fail(error)
                idle = True
            if idle:
                self._wake.wait(None if self._failure else self._engine.rest_s())
                if self._arrivals.soon:
                    time.sleep(TOGETHER_S)
        self._close()

    def _turn(self) -> bool:
        """Empty the inbox, and step once or tidy a little; False if there is nothing to do."""
        while self._inbox:
            self._inbox.popleft()()
        busy = self._failure is None and self._engine.has_work
        if busy:
            result = self._engine.step()
            self._stats = self._engine.stats()
            self._report(result)
        elif self._failure is None:
            self._engine.check()
            busy = self._engine.tidy()
        self._stats = self._engine.stats()
        return busy

    def _enter(self, request: EngineRequest, choices: Choices) -> None:
        if self._failure is None:
            self._engine.enter(choices)
        else:
            self._refuse(request, RequestRefused(ENGINE_ERROR, self._failure), choices.arrived_s)

    def _refuse(self, request: EngineRequest, refused: RequestRefused, arrived_s: float) -> None:
        self._finish([self._engine.refuse(request, refused, arrived_s)])

    def _lose(self, what: str) -> None:
        """The model was lost; a step that runs notices by itself, but there may be none."""
        self._post(lambda: None if self._failure else self._fail(ModelFailed(what)))

    def _fail(self, error: Exception) -> None:
        """Give up: nothing that the engine holds can be trusted any more."""
        log.critical("the engine's loop failed", exc_info=error)
        self._failure = f"the engine failed: {type(error).__name__}: {error}"
        self._report(self._engine.abandon(self._failure))
        self._stats = self._engine.stats()

    def _close(self) -> None:
        """Abort whatever is left, on the engine's thread if it ever ran."""
        with self._lock:
            self._closed = True
        for early in self._arrivals.take_all_back():
            self._finish([self._engine.aborted(*early)])
        while self._inbox:
            self._inbox.popleft()()
        self._engine.abort_all()
        self._report(self._engine.report())
        self._stats = self._engine.stats()

    def _report(self, result: StepResult) -> None:
        for request_id, admitted_s in result.admitted:
            self._tell(self._listener.on_admitted, request_id, admitted_s)
        if result.deltas:
            self._tell(self._listener.on_tokens, result.deltas)
        if result.finished:
            self._finish(result.finished)

    def _finish(self, outputs: Sequence[RequestOutput]) -> None:
        with self._lock:
            self._live.difference_update(output.request_id for output in outputs)
        self._tell(self._listener.on_finished, outputs)

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            callback(*arguments)
        except Exception:
            log.exception("the engine's listener raised")
