"""What waits, and how fast it goes."""

from __future__ import annotations

from typing import Any

import pytest

from ledger import Ledger
from ledger.contract import Backlog, Drain


def test_what_waits_is_counted_by_model_and_tenant(ledger: Ledger, desk: Any) -> None:
    for _ in range(3):
        desk.queued(tenant="a", prompt=[1, 2], max_tokens=8)
    desk.queued(tenant="b", model="n", prompt="four chars each", max_tokens=6, n=2)
    desk.running(), desk.succeeded()
    assert ledger.backlog() == {("m", "a"): Backlog(3, 30), ("n", "b"): Backlog(1, 16)}


def test_tokens_that_somebody_counted_are_taken(ledger: Ledger) -> None:
    from headrace.contract import JobRequest

    ledger.submit(JobRequest(model="m", prompt="x", max_tokens=2**70), tokens=77)
    ledger.submit(JobRequest(model="m", prompt="x", max_tokens=2**70))
    assert ledger.backlog() == {("m", "default"): Backlog(2, 77 + 2**31)}


def test_the_rate_is_that_of_the_newest_ends(ledger: Ledger, desk: Any, sql: Any) -> None:
    assert ledger.drains(["m", "n"]) == {"m": Drain(), "n": Drain()}
    for _ in range(3):
        desk.succeeded(prompt=[1, 2], max_tokens=8)
    desk.failed(prompt=[1, 2], max_tokens=8)
    ledger.request_cancel([desk.queued()])
    now = ledger.now()
    sql("UPDATE jobs SET finished_at = :then WHERE finished_at IS NOT NULL", then=moment(now, -20))
    drain = ledger.drains(["m"])["m"]
    assert drain.jobs_per_s == pytest.approx(4 / 20, rel=0.2)
    assert drain.tokens_per_s == pytest.approx(40 / 20, rel=0.2)


def moment(now: Any, offset_s: float) -> str:
    from datetime import timedelta

    return (now + timedelta(seconds=offset_s)).strftime("%Y-%m-%d %H:%M:%S.%f") + ""


def test_a_key_is_known_to_its_tenant(ledger: Ledger, desk: Any) -> None:
    desk.queued(tenant="a", idempotency_key="k")
    assert ledger.submitted("a", "k")
    assert not ledger.submitted("b", "k")
    assert not ledger.submitted("a", "other")
