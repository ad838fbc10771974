"""The engine on its own thread, fed without a pause, with everything that can go wrong going wrong."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.endurance.growth import Sample
from bench.endurance.mixture import POISON, Asked, Mixture
from bench.endurance.random_model import CONTEXT_TOKENS
from engine.batch import Batch
from engine.config import EngineConfig
from engine.contract import EngineStats
from engine.cpu.model import CpuModel
from engine.request import EngineRequest, RequestOutput, SamplingParams, TokenDelta
from engine.thread import EngineThread
from kernels.sampling import Sampled

SEQUENCES = 64
LIVE_REQUESTS = 128
KV_BYTES = 12 * 2**20
"""Too little for all that run at once."""
LESS_KV_BYTES = 8 * 2**20
LISTENER_FAILS = 1 / 500
STEPS_TO_SHORTAGE = 4000
"""Steps from one shortage of memory to the next."""
PATIENCE_S = 300
_CANARY = EngineRequest("canary", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), prompt="The canary")


class FaultyModel(CpuModel):
    """Raises for a poisoned prompt, and is short of memory now and then."""

    steps = 0

    def execute(self, batch: Batch) -> Sampled:
        self.steps += 1
        if any(tuple(tokens[: len(POISON)]) == POISON for tokens in batch.known_tokens):
            raise RuntimeError("the prompt is poisoned")
        if self.steps % STEPS_TO_SHORTAGE == 0:
            raise MemoryError("this step is too large")
        return super().execute(batch)


@dataclass
class Listener:
    """Counts what it is told, drops requests while they run, and raises at times. `EngineListener`."""

    draw: random.Random
    raised: int = 0
    tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    canary: tuple[int, ...] = ()
    host: EngineThread | None = None

    def __post_init__(self) -> None:
        self._to_abort: dict[str, int] = {}
        self._slots = threading.Semaphore(LIVE_REQUESTS)

    def submit(self, asked: Asked) -> None:
        """Have a request run as soon as there are not too many."""
        assert self.host is not None
        if not self._slots.acquire(timeout=PATIENCE_S):
            raise TimeoutError(f"no request ended in {PATIENCE_S} s")
        if asked.abort_after is not None:
            self._to_abort[asked.request.id] = asked.abort_after
        self.host.submit(asked.request)
        if asked.abort_after == 0:
            self.host.abort(asked.request.id)

    def wait_idle(self) -> None:
        """Until nothing is live."""
        for taken in range(LIVE_REQUESTS):
            if not self._slots.acquire(timeout=PATIENCE_S):
                raise TimeoutError(f"{LIVE_REQUESTS - taken} requests are live after {PATIENCE_S} s")
        self._slots.release(LIVE_REQUESTS)

    def on_admitted(self, request_id: str, admitted_s: float) -> None:
        self._fail_at_times()

    def on_tokens(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            self.tokens += len(delta.token_ids)
            left = self._to_abort.get(delta.request_id)
            if left is not None:
                self._to_abort[delta.request_id] = left - 1
                if left == 1 and self.host is not None:
                    self.host.abort(delta.request_id)
        self._fail_at_times()

    def on_finished(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self._to_abort.pop(output.request_id, None)
            self.reasons[output.error_code or output.finish_reason.value] += 1
            if output.request_id == _CANARY.id:
                assert output.token_ids, "the canary made no token"
                self.canary = output.token_ids
            self._slots.release()
        self._fail_at_times()

    def _fail_at_times(self) -> None:
        if self.draw.random() < LISTENER_FAILS:
            self.raised += 1
            raise RuntimeError("the listener fails")


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did."""

    samples: tuple[Sample, ...]
    stats: EngineStats
    reasons: Counter[str]
    """Requests by their finish reason, or their error code."""
    listener_raised: int


def config(model: Path, **changes: Any) -> EngineConfig:
    """An engine for the random model, whose memory is short."""
    settings: dict[str, Any] = {
        "model": str(model), "cache": model.parent / "cache", "dtype": "float32", "max_num_seqs": SEQUENCES,
        "max_seq_len": CONTEXT_TOKENS, "max_num_batched_tokens": 512, "kv_cache_bytes": KV_BYTES,
        "swap_space_bytes": 4 * 2**20, "batch_window_ms": 1.0, "warm_up": False, "threads": 1,
    }  # fmt: skip
    return EngineConfig(**(settings | changes))


def run(model: CpuModel, engine_config: EngineConfig, tokens: int, rounds: int, seed: int) -> Iterator[Report]:
    """Make so many tokens in rounds, and report after each: then nothing runs, and the memory is sampled.

    Between two rounds the KV memory shrinks and grows under load, and the engine sleeps and wakes. A greedy request
    among the others has to get the same tokens in every round. Raises AssertionError if an invariant is broken.
    """
    listener = Listener(random.Random(seed))
    host = listener.host = EngineThread(model, engine_config, listener)
    mixture = Mixture(seed)
    samples: list[Sample] = []
    expected: tuple[int, ...] = ()
    host.start()
    try:
        for number in range(rounds):
            goal = tokens * (number + 1) // rounds
            _feed(listener, mixture, goal, host, LESS_KV_BYTES if number % 2 else KV_BYTES)
            listener.wait_idle()
            host.sleep().result(PATIENCE_S)
            host.wake().result(PATIENCE_S)
            host.check()
            assert host.healthy, host.stats().failure
            assert host.stats().pages_free == host.stats().pages_total, "an idle engine holds pages"
            expected = expected or listener.canary
            assert listener.canary == expected, f"round {number}: a greedy request got other tokens"
            samples.append(Sample.take(listener.tokens))
            yield Report(tuple(samples), host.stats(), listener.reasons.copy(), listener.raised)
    finally:
        host.stop()


def _feed(listener: Listener, mixture: Mixture, goal: int, host: EngineThread, kv_bytes: int) -> None:
    """Submit until so many tokens are made; in the middle of it the KV memory changes and the engine sleeps."""
    began = listener.tokens
    middle = (began + goal) // 2
    listener.canary = ()
    listener.submit(Asked(_CANARY, None))
    changed = False
    while listener.tokens < goal:
        listener.submit(mixture.next())
        if not changed and listener.tokens > middle:
            changed = True
            host.set_kv_bytes(kv_bytes).result(PATIENCE_S)
            host.sleep().result(PATIENCE_S)
            host.wake().result(PATIENCE_S)
