"""Celery's execution pool whose slots are sequences in the engine.

Every job runs Celery's own tracer in a greenlet on the hub thread and parks there while the ledger
or the engine works for it. The threads that work talk back through `post`, which wakes the hub by an
eventfd: what a reader does is acknowledged before the next poll, what `call_soon` does is not.
Acknowledgements of one round of the hub go to the broker together.
"""

from __future__ import annotations

import itertools
import os
import queue
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import signals
from celery.concurrency.base import BasePool
from celery.platforms import EX_FAILURE
from celery.utils.log import get_logger
from celery.worker import state
from greenlet import GreenletExit
from headrace.counting import counted
from kombu.asynchronous import get_event_loop

from engine.request import EngineRequest, RequestOutput
from settings import get_settings
from worker import garbage
from worker.gate import Gate
from worker.liveness import Liveness
from worker.message import JobMessage
from worker.services import Services, start_services
from worker.slot import Cause, Slot, Stop
from worker.trace import Traced

log = get_logger(__name__)

FIRST_PID = 1_000_001
"""Celery only hands a pid back to the pool; these can't be mistaken for a process."""
SWITCH_S = 0.0005
"""How long another thread may keep the interpreter while the engine's waits for it, between two steps."""
PATIENCE_S = 5.0
"""How long jobs that are handed back may wait for the ledger before they are left to their leases."""
IMPATIENCE_S = 1.0
"""The same, while the ledger is known to be away."""


class EnginePool(BasePool):  # type: ignore[misc]  # Celery has no types
    """As many jobs at once as the engine holds sequences, in one process, with the model resident."""

    signal_safe = False
    uses_semaphore = False
    body_can_be_buffer = True

    services: Services
    app: Any
    limit: int

    # -- life ----------------------------------------------------------------------------------

    def on_start(self) -> None:
        """Load the model, before the consumer connects. A failure ends the worker with a line, not a traceback."""
        self.slots: dict[str, Slot] = {}
        """By task id."""
        self.settled: list[str] = []
        """Delivery tags of acknowledged messages that the broker is still to forget."""
        self.forget: Callable[[list[str]], bool] = lambda _: False
        """Has the broker forget messages; false if it can't now. `worker.lease` sets it."""
        self.gate = Gate()
        self.liveness = Liveness(time.monotonic())
        self._generating: dict[str, Callable[[RequestOutput | Exception], None]] = {}
        self._pids = itertools.count(FIRST_PID)
        self._inbox: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        self._rung = False
        """Whether the hub has been woken for what is in the inbox."""
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._hub: Any = get_event_loop()
        self._drain_until_s: float | None = None
        self._signals = 0
        self._stopped = False
        _, hostname = self.options["initargs"]
        try:
            self.services = start_services(get_settings(), self.app, hostname, self)
        except Exception as exc:
            log.critical("the worker can't start: %s", exc, exc_info=log.isEnabledFor(10))
            sys.exit(EX_FAILURE)
        self.limit = min(self.limit, self.services.max_num_seqs)
        self.services.engine.set_max_num_seqs(self.limit)
        sys.setswitchinterval(SWITCH_S)
        garbage.resume()
        signals.worker_shutting_down.connect(self._on_signal, weak=False)
        signals.worker_process_init.send(sender=None)

    def register_with_event_loop(self, hub: Any) -> None:
        """Called again after each reconnect."""
        self._hub = hub
        hub.add_reader(self._eventfd, self.pump)
        hub.on_tick.add(self.settle)
        hub.call_repeatedly(1.0, self._check_engine)

    def _check_engine(self) -> None:
        self.liveness.turned(time.monotonic())
        if not self.services.engine.healthy and state.should_stop is None:
            log.critical("the engine's thread has died: handing the jobs back and leaving")
            state.should_stop = EX_FAILURE

    # -- one way in ----------------------------------------------------------------------------

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Have the hub thread call something, from any thread or signal handler."""
        self._inbox.put((call, args))
        if not self._rung:
            self._rung = True
            os.eventfd_write(self._eventfd, 1)

    def pump(self, timeout_s: float = 0.0) -> None:
        """Make the calls that were posted; wait for the first one at most `timeout_s`."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)
        self._rung = False
        while True:
            try:
                call, args = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
            except queue.Empty:
                return
            timeout_s = 0.0
            try:
                call(*args)
            except Exception:
                log.exception("a call on the hub thread failed")

    # -- jobs ----------------------------------------------------------------------------------

    def on_apply(self, target: Any, args: Any = (), kwargs: Any = None, callback: Any = None, **_: Any) -> Slot:
        """`target` is Celery's tracer, which calls the task."""
        return self.take(callback.__self__, lambda _: target(*args))

    def take(self, message: JobMessage, trace: Callable[[Slot], Traced]) -> Slot:
        """Work on a message: `trace` runs in the job's greenlet."""
        self.liveness.took()
        slot = self.slots.get(message.id)
        if slot is not None:
            self.post(self._redelivered, slot, message)
            return slot
        slot = self.slots[message.id] = Slot(self, next(self._pids), message)
        self.post(slot.begin, lambda: self._run(slot, trace))
        return slot

    def _run(self, slot: Slot, trace: Callable[[Slot], Traced]) -> None:
        try:
            traced = trace(slot)
        except GreenletExit:
            return
        except BaseException:
            log.exception("job %s: the tracer failed", slot.named)
            traced = (True, ExceptionInfo(), 0.0)
        self._forget(slot)
        slot.message.on_success(traced)

    def settle(self) -> None:
        """Tell the broker of all messages that were acknowledged since the last time."""
        if self.settled and self.forget(self.settled):
            self.settled.clear()

    def _forget(self, slot: Slot) -> None:
        slot.release_timers()
        self.slots.pop(slot.task_id, None)
        self.gate.leave(slot)

    def _redelivered(self, slot: Slot, message: JobMessage) -> None:
        """The broker handed out a job again that runs here: the job answers for one message, and only one."""
        running = slot.message
        if self.slots.get(slot.task_id) is not slot:
            message.reject(requeue=True)
            return
        if message.delivery_tag == running.delivery_tag:
            state.active_requests.discard(running)
            message.revocation = running.revocation
            slot.message = message
            if slot.accepted:
                message.on_accepted(slot.pid, time.monotonic())
        else:
            state.task_ready(message)
            message.acknowledge()
            state.requests[slot.task_id] = running

    def accept(self, slot: Slot) -> None:
        """The engine admitted the job: Celery calls it started, and its time limits begin."""
        if slot.accepted or self.slots.get(slot.task_id) is not slot:
            return
        slot.accepted = True
        message = slot.message
        hard_s, soft_s = message.time_limits
        soft_s = soft_s or message.task.soft_time_limit or self.options.get("soft_timeout")
        hard_s = hard_s or message.task.time_limit or self.options.get("timeout")
        if soft_s:
            self.stop_after(slot, soft_s, Cause.TIME_LIMIT, f"soft time limit of {soft_s:g} s exceeded")
        if hard_s:
            self.stop_after(slot, hard_s, Cause.TIME_LIMIT, f"time limit of {hard_s:g} s exceeded")
        message.on_accepted(slot.pid, time.monotonic())

    def enter(self, request: EngineRequest, done: Callable[[RequestOutput | Exception], None]) -> None:
        """Give a request to the engine; `done` gets its output once its pages are free."""
        self._generating[request.id] = done
        try:
            self.services.engine.submit(request)
        except BaseException:
            del self._generating[request.id]
            raise

    def finished(self, output: RequestOutput) -> None:
        done = self._generating.pop(output.request_id, None)
        if done is not None:
            done(output)

    def admitted(self, job_id: str) -> None:
        slot = self.find(job_id)
        if slot is not None:
            self.accept(slot)

    def stop_after(self, slot: Slot, delay_s: float, cause: Cause, message: str) -> None:
        """Stop the job once `delay_s` has passed, if it is still here."""
        slot.timers.append(self.after(delay_s, lambda: self.stop_job(slot, cause, message)))

    def after(self, delay_s: float, call: Callable[[], None]) -> Any:
        """Have the hub thread call something later; gives what can be cancelled."""
        return self._hub.call_later(delay_s, call)

    # -- stopping jobs -------------------------------------------------------------------------

    def find(self, job_id: str) -> Slot | None:
        """The slot of a job that was claimed."""
        slot = self.slots.get(job_id)
        if slot is not None and slot.job_id in (None, job_id):
            return slot
        return next((slot for slot in self.slots.values() if slot.job_id == job_id), None)

    def stop_job(self, slot: Slot, cause: Cause, message: str) -> None:
        """End a job early. The engine lets go within a step; the job's own path records the rest."""
        if slot.stop is None or cause is Cause.LOST:
            slot.stop = Stop(cause, message, time.monotonic())
        if slot.in_engine and slot.job_id is not None:
            self.services.engine.abort(slot.job_id)
        self.gate.wake(slot)

    def cancel(self, job_id: str) -> None:
        """Whatever attempt of the job is here."""
        slot = self.find(job_id)
        if slot is not None:
            self.stop_job(slot, Cause.CANCELLED, "cancelled on request")

    def cancel_attempt(self, job_id: str, fence: int) -> None:
        """One that is still being claimed is cancelled when it turns out to be this attempt."""
        slot = self.find(job_id)
        if slot is None:
            return
        slot.cancelled_fence = fence
        if slot.fence == fence:
            slot.message.note_termination()
            self.stop_job(slot, Cause.CANCELLED, "cancelled on request")

    def lose_attempt(self, job_id: str, fence: int) -> None:
        slot = self.find(job_id)
        if slot is not None and slot.fence == fence:
            log.warning("job %s: its lease was lost, stopping it", slot.named)
            self.stop_job(slot, Cause.LOST, "the lease was lost")

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        for slot in self.slots.values():
            if slot.pid == pid:
                self.stop_job(slot, Cause.CANCELLED, "terminated")

    # -- shutdown ------------------------------------------------------------------------------

    def _on_signal(self, **_: Any) -> None:
        """Celery says that a signal to leave came. Runs in the signal handler: it only wakes the hub."""
        self._signals += 1
        if self._signals > 1:
            self._drain_until_s = 0.0
        self.post(lambda: None)

    @property
    def leaving(self) -> bool:
        """Whether this worker takes no more jobs."""
        return self._drain_until_s is not None

    @property
    def has_room(self) -> bool:
        """Whether this worker would take one more message."""
        return len(self.slots) < self.limit and not self.leaving and not self.gate.closed

    def on_close(self) -> None:
        """Leaving: running jobs get their time, jobs that the engine hasn't started go back now."""
        if self._drain_until_s is None:
            self._drain_until_s = time.monotonic() + self.services.drain_s
        for slot in list(self.slots.values()):
            if not slot.accepted:
                self.stop_job(slot, Cause.HAND_BACK, "the worker is leaving")

    def on_stop(self) -> None:
        self._drain()

    def on_terminate(self) -> None:
        self._drain_until_s = 0.0
        self._drain()

    def _drain(self) -> None:
        """The hub has stopped: pump by hand until each job is committed and acknowledged, or handed back."""
        give_up_s: float | None = None
        while self.slots:
            now = time.monotonic()
            if give_up_s is None and all(slot.recorded for slot in self.slots.values()):
                give_up_s = now + IMPATIENCE_S
            leaving = state.should_terminate is not None or not self.services.engine.healthy
            if give_up_s is None and (leaving or now >= (self._drain_until_s or 0.0)):
                give_up_s = now + (PATIENCE_S if self.services.writer.available() else IMPATIENCE_S)
                log.warning("handing back %s", counted(len(self.slots), "job"))
                for slot in list(self.slots.values()):
                    self.stop_job(slot, Cause.HAND_BACK, "the worker is leaving")
            if give_up_s is not None and now >= give_up_s:
                recorded = sum(slot.recorded for slot in self.slots.values())
                log.error(
                    "left %s to the leases, and %d to be told by the ledger alone",
                    counted(len(self.slots) - recorded, "job"),
                    recorded,
                )
                self.slots.clear()
                break
            self.pump(0.05)
            self.turn_hub()
        self.turn_hub()
        if not self._stopped:
            self._stopped = True
            self.services.stop()

    def turn_hub(self) -> None:
        """Do once what else the hub's loop does: timers, what was to be called soon, and acknowledgements."""
        self._hub.fire_timers(max_timers=50)
        for callback in self._hub._pop_ready():
            callback()
        self.settle()

    # -- size and state ------------------------------------------------------------------------

    def grow(self, n: int = 1) -> None:
        """Admit up to `n` more sequences at once, never more than the engine was made for."""
        self.limit = max(1, min(self.limit + n, self.services.max_num_seqs))
        self.services.engine.set_max_num_seqs(self.limit)

    def shrink(self, n: int = 1) -> None:
        """Admit `n` fewer sequences at once; running ones are not touched."""
        self.grow(-n)

    def _get_info(self) -> dict[str, Any]:
        info: dict[str, Any] = super()._get_info()
        return {**info, "processes": [os.getpid()], "slots": len(self.slots), **self.services.info()}
