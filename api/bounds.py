"""Bounds on what may wait: over one of them a job is refused, with the time at which to try again."""

from __future__ import annotations

import time
from collections import Counter

from headrace.contract import JobRequest
from headrace.counting import counted
from headrace.errors import TooManyRequests

from api.threads import LedgerThreads
from ledger.contract import Backlog, Drain, LedgerProtocol
from settings import QueueSettings

READ_S = 1.0
"""How old the numbers may get, if reading them takes no time."""
READ_SHARE = 0.05
"""No more of the time than this goes into reading them."""
MOST_PAUSE_S = 60.0
"""The longest that a client is asked to wait, also if nothing ends."""


class QueueBounds:
    """What waits, as the ledger said a moment ago, and what this process has accepted since.

    Several doors thus let through a little more than the bounds: what the others accept within that moment.
    """

    def __init__(self, ledger: LedgerProtocol, threads: LedgerThreads, most: QueueSettings) -> None:
        self._ledger = ledger
        self._threads = threads
        self._most = most
        self._jobs: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()
        self._read_again_s = float("-inf")
        self._reading = False

    async def check(self, request: JobRequest, tokens: int) -> None:
        """Raise TooManyRequests if the job has no room. One that repeats an accepted submission needs none."""
        await self._refresh()
        refusal = self._refusal(request, tokens)
        if refusal is None:
            return
        key = request.idempotency_key
        if key is not None and await self._threads.call(self._ledger.submitted, request.tenant, key):
            return
        message, code, over, sharers = refusal
        drain = (await self._threads.call(self._ledger.drains, [request.model]))[request.model]
        pause_s = pause_until_room_s(over, drain, sharers)
        raise TooManyRequests(
            f"{message}; try again in {pause_s:.0f} s",
            type="rate_limit_error",
            code=code,
            status=429,
            retry_after_s=pause_s,
        )

    def add(self, request: JobRequest, tokens: int) -> None:
        """Count a job that was accepted."""
        self._jobs[request.model, request.tenant] += 1
        self._tokens[request.model, request.tenant] += tokens

    async def _refresh(self) -> None:
        """One caller reads; the others go by the numbers that are there."""
        began_s = time.monotonic()
        if self._reading or began_s < self._read_again_s:
            return
        self._reading = True
        try:
            found = await self._threads.call(self._ledger.backlog)
        finally:
            self._reading = False
        self._jobs = Counter({key: waiting.jobs for key, waiting in found.items()})
        self._tokens = Counter({key: waiting.tokens for key, waiting in found.items()})
        now_s = time.monotonic()
        self._read_again_s = now_s + max(READ_S, (now_s - began_s) / READ_SHARE)

    def _refusal(self, request: JobRequest, tokens: int) -> tuple[str, str, Backlog, int] | None:
        """The message, its code, how much is over the bound, and how many tenants share what comes free."""
        model, tenant = request.model, request.tenant
        waiting = [key for key in self._jobs if key[0] == model]
        whole = Backlog(sum(self._jobs[key] for key in waiting), sum(self._tokens[key] for key in waiting))
        own = Backlog(self._jobs[model, tenant], self._tokens[model, tenant])
        most = self._most
        if over := _over(own, tokens, most.tenant_max_jobs, most.tenant_max_tokens):
            room = f"of at most {most.tenant_max_jobs} and {most.tenant_max_tokens}"
            message = f"tenant {tenant!r} has {_told(own)} waiting for {model!r}, {room}"
            return message, "tenant_queue_full", over, max(1, len(waiting))
        if over := _over(whole, tokens, most.model_max_jobs, most.model_max_tokens):
            room = f"of at most {most.model_max_jobs} and {most.model_max_tokens}"
            message = f"the queue of {model!r} is full, with {_told(whole)} waiting, {room}"
            return message, "queue_full", over, 1
        return None


def _told(waiting: Backlog) -> str:
    return f"{counted(waiting.jobs, 'job')} with {counted(waiting.tokens, 'token')}"


def _over(waiting: Backlog, tokens: int, most_jobs: int, most_tokens: int) -> Backlog | None:
    """How much has to go before a job of so many tokens may come; an empty queue takes any."""
    over = Backlog(max(0, waiting.jobs + 1 - most_jobs), max(0, waiting.tokens + tokens - most_tokens))
    return over if waiting.jobs and (over.jobs or over.tokens) else None


def pause_until_room_s(over: Backlog, drain: Drain, sharers: int) -> float:
    """Seconds, 1 to `MOST_PAUSE_S`, until so much has gone at the measured rate, shared by so many tenants."""
    pauses_s = [1.0]
    for amount, rate in ((over.jobs, drain.jobs_per_s), (over.tokens, drain.tokens_per_s)):
        if amount:
            pauses_s.append(amount * sharers / rate if rate > 0 else MOST_PAUSE_S)
    return min(MOST_PAUSE_S, max(pauses_s))
