"""What a host of the engine (the worker, `LLM`, a test) may call, and what it is called with."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from engine.request import EngineRequest, RequestOutput, TokenDelta


class EngineListener(Protocol):
    """Receives what the engine does. Called on the engine's thread; must return at once and not raise."""

    def on_admitted(self, request_id: str, admitted_s: float) -> None:
        """The request took its slot and its first pages. Once for each request."""
        ...

    def on_tokens(self, deltas: Sequence[TokenDelta]) -> None:
        """The output of one step, for all requests that gained text or tokens."""
        ...

    def on_finished(self, outputs: Sequence[RequestOutput]) -> None:
        """Requests that ended, aborted ones included. Their pages are free already. Once for each request."""
        ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges; a consistent snapshot from between two steps."""

    running: int
    waiting: int
    max_num_seqs: int
    running_by_priority: dict[int, int]
    waiting_by_priority: dict[int, int]
    pages_total: int
    pages_free: int
    steps: int
    last_step_s: float
    """Monotonic moment at which the last step ended."""
    prompt_tokens: int
    generation_tokens: int
    drafted_tokens: int
    """Tokens that were guessed ahead and computed."""
    accepted_tokens: int
    """Of those, the ones that came true."""
    preemptions: int
    swaps: int
    """Preempted sequences whose KV was copied to the host's memory."""
    swapped_pages: int
    """Pages there now."""
    evictions: int
    """Cached pages that gave way to others."""
    cached_tokens: int
    """Of the prompts' tokens, those that were found computed."""
    fragmentation: float
    """Share of the places in the KV memory's leased extents that is free."""
    max_batch_size: int
    """Most sequences that one step has held."""
    requests_finished: dict[str, int]
    """By finish reason."""
    failure: str | None = None
    """What ended the engine's loop; every request fails from then on. None while it is healthy."""

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompts' tokens that was found computed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class EngineHost(Protocol):
    """An engine on its own thread (`engine.thread.EngineThread`)."""

    @property
    def healthy(self) -> bool:
        """False once the engine's loop has failed (`EngineStats.failure`). It doesn't recover: replace the process."""
        ...

    @property
    def max_seq_len(self) -> int:
        """Most tokens of prompt and output: the model's limit or the configured one."""
        ...

    def start(self) -> None: ...

    def submit(self, request: EngineRequest) -> None:
        """Take a request from any thread. Never blocks.

        A request that can't run (see `RequestRefused`) ends through `on_finished` with reason `error`.
        Raises ValueError if the id is live, and RuntimeError once the host is stopping.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Drop a request at the next step, from any thread; `on_finished` reports it. Unknown ids are ignored."""
        ...

    def set_max_num_seqs(self, n: int) -> None:
        """Admission cap from now on; running requests are not touched."""
        ...

    def set_kv_bytes(self, kv_bytes: int) -> Future[None]:
        """Change the size of the KV memory between two steps; requests without room any more make way and return.

        The future ends with `NoRoom` if there is no such memory or it is less than one request may need.
        """
        ...

    def sleep(self) -> Future[None]:
        """Give the memory of weights and KV back; requests wait. Done when the memory is free."""
        ...

    def wake(self) -> Future[None]:
        """Load the weights again and go on where it stopped. Ends with what went wrong, and sleeps on, if it can't."""
        ...

    def stats(self) -> EngineStats: ...

    def check(self) -> None:
        """Raise AssertionError if an invariant of scheduler or memory is broken. Between steps only."""
        ...

    def stop(self) -> None:
        """Abort what runs, end the thread, release everything. Safe to call twice."""
        ...
