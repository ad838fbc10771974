"""What may wait, for each model and each tenant."""

from __future__ import annotations

import pytest
from headrace.contract import JobRequest
from headrace.errors import TooManyRequests

from api.bounds import MOST_PAUSE_S, QueueBounds, pause_until_room_s
from api.threads import LedgerThreads
from ledger import Ledger
from ledger.contract import Backlog, Drain
from settings import QueueSettings


def asked(tenant: str = "a", model: str = "m", **fields: object) -> JobRequest:
    return JobRequest.model_validate({"model": model, "prompt": "x", "tenant": tenant, **fields})


class Door:
    """Accepts jobs as the route does."""

    def __init__(self, ledger: Ledger, **most: int) -> None:
        self.ledger = ledger
        self.bounds = QueueBounds(ledger, LedgerThreads(), QueueSettings(**most))

    async def accept(self, request: JobRequest, tokens: int = 10) -> None:
        await self.bounds.check(request, tokens)
        if self.ledger.submit(request, tokens=tokens).created:
            self.bounds.add(request, tokens)

    async def refusal(self, request: JobRequest, tokens: int = 10) -> TooManyRequests:
        with pytest.raises(TooManyRequests) as caught:
            await self.accept(request, tokens)
        return caught.value


async def test_a_full_queue_refuses_with_numbers_and_a_time(ledger: Ledger) -> None:
    door = Door(ledger, model_max_jobs=3)
    for tenant in "abc":
        await door.accept(asked(tenant))
    refused = await door.refusal(asked("d"))
    assert (refused.status, refused.code, refused.retry_after_s) == (429, "queue_full", MOST_PAUSE_S)
    assert "3 jobs" in refused.message
    assert "at most 3" in refused.message
    await door.accept(asked(model="other"))


async def test_a_tenant_has_a_bound_of_its_own(ledger: Ledger) -> None:
    door = Door(ledger, tenant_max_jobs=2)
    for _ in range(2):
        await door.accept(asked("a"))
    refused = await door.refusal(asked("a"))
    assert refused.code == "tenant_queue_full"
    assert "'a' has 2 jobs" in refused.message
    await door.accept(asked("b"))


async def test_tokens_are_bounded_too_and_an_empty_queue_takes_any_job(ledger: Ledger) -> None:
    door = Door(ledger, model_max_tokens=100, tenant_max_tokens=60)
    await door.accept(asked("a"), tokens=500)
    assert (await door.refusal(asked("a"), tokens=1)).code == "tenant_queue_full"
    assert (await door.refusal(asked("b"), tokens=1)).code == "queue_full"


async def test_a_repeated_submission_needs_no_room(ledger: Ledger) -> None:
    """A client whose answer was lost learns of its job, however full the queue is."""
    door = Door(ledger, model_max_jobs=1)
    first = asked(idempotency_key="k")
    await door.accept(first)
    await door.accept(first)
    await door.refusal(asked(idempotency_key="other"))
    await door.refusal(asked("b", idempotency_key="k"))


async def test_what_has_been_claimed_makes_room(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    from ledger.contract import Claim

    door = Door(ledger, model_max_jobs=1)
    await door.accept(asked())
    [row] = ledger.outbox(1)
    ledger.claim([Claim(row.job_id)], "w", 30)
    await door.refusal(asked())
    monkeypatch.setattr(door.bounds, "_read_again_s", 0.0)
    await door.accept(asked())


@pytest.mark.parametrize(
    ("over", "drain", "sharers", "pause_s"),
    [
        (Backlog(1, 0), Drain(10, 1000), 1, 1.0),
        (Backlog(40, 0), Drain(10, 1000), 1, 4.0),
        (Backlog(40, 0), Drain(10, 1000), 3, 12.0),
        (Backlog(0, 9000), Drain(10, 1000), 1, 9.0),
        (Backlog(10**6, 0), Drain(10, 1000), 1, MOST_PAUSE_S),
        (Backlog(1, 0), Drain(), 1, MOST_PAUSE_S),
    ],
)
def test_the_pause_is_what_the_excess_takes_at_the_measured_rate(
    over: Backlog, drain: Drain, sharers: int, pause_s: float
) -> None:
    assert pause_until_room_s(over, drain, sharers) == pause_s
