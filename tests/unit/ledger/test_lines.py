"""Whose turn it is: windows, fair shares between tenants, and what has waited for too long."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from headrace.contract import Priority

from ledger import Ledger
from ledger.contract import Topic, Windows
from ledger.lines import Line


def send(ledger: Ledger, windows: Windows, limit: int = 500) -> list[str]:
    """The jobs that a relay sends in one go."""
    told: list[str] = []
    while rows := ledger.outbox(limit, windows):
        ledger.sent([row.id for row in rows])
        told += [row.job_id for row in rows]
    return told


def test_the_broker_is_given_a_window_of_each_model_and_class(ledger: Ledger, desk: Any) -> None:
    low = [desk.queued(priority="low") for _ in range(6)]
    other = [desk.queued(model="n") for _ in range(2)]
    windows = Windows(4)
    assert set(send(ledger, windows)) == {*low[:4], *other}
    urgent = desk.queued(priority="high")
    assert send(ledger, windows) == [urgent]
    desk.claimed(low[0])
    assert send(ledger, windows) == [low[4]]
    ledger.request_cancel([low[1]])
    assert send(ledger, windows) == [low[5]]


def test_a_single_job_is_not_behind_another_tenants_thousands(ledger: Ledger, desk: Any) -> None:
    """A tenant that fills the queue keeps others waiting for one window at most."""
    many = [desk.queued(tenant="a") for _ in range(40)]
    windows = Windows(8)
    assert send(ledger, windows) == many[:8]
    single = desk.queued(tenant="b")
    assert send(ledger, windows) == []
    desk.claimed(many[0])
    assert send(ledger, windows) == [single]
    desk.claimed(many[1])
    assert send(ledger, windows) == [many[8]]


def test_tenants_share_by_weight_and_in_tokens(ledger: Ledger, desk: Any) -> None:
    jobs = {}
    for _ in range(30):
        for tenant, tokens in (("light", 100), ("heavy", 100), ("wordy", 400)):
            jobs[desk.queued(tenant=tenant, prompt=[1], max_tokens=tokens - 1)] = tenant
    sent = Counter(jobs[job_id] for job_id in send(ledger, Windows(26, {"heavy": 2.0})))
    assert sent["heavy"] == pytest.approx(2 * sent["light"], abs=1)
    assert sent["light"] == pytest.approx(4 * sent["wordy"], abs=1)
    assert sum(sent.values()) == 26


def test_what_one_tenant_leaves_goes_to_the_others(ledger: Ledger, desk: Any) -> None:
    few = [desk.queued(tenant="few") for _ in range(2)]
    many = [desk.queued(tenant="many") for _ in range(60)]
    sent = send(ledger, Windows(50))
    assert len(sent) == 50
    assert set(few) < set(sent)
    assert [job_id for job_id in sent if job_id in many] == many[:48]


def test_a_job_that_is_due_later_holds_nobody_up(ledger: Ledger, desk: Any, sql: Any) -> None:
    later, now = desk.queued(), desk.queued()
    sql("UPDATE outbox SET due_at = '9999-01-01 00:00:00.000000' WHERE job_id = :id", id=later)
    assert send(ledger, Windows(1)) == [now]


def test_a_revocation_needs_no_room(ledger: Ledger, desk: Any) -> None:
    lease = desk.running()
    desk.queued(), desk.queued()
    send(ledger, Windows(1))
    ledger.request_cancel([lease.job_id])
    [row] = ledger.outbox(10, Windows(1))
    assert (row.topic, row.job_id) == (Topic.REVOKE, lease.job_id)


def test_what_the_broker_holds_for_too_long_is_sent_again_in_the_first_class(
    ledger: Ledger, desk: Any, sql: Any
) -> None:
    """Low jobs aren't starved by a stream of higher ones, nor do they take their place."""
    low = [desk.queued(priority="low") for _ in range(6)]
    urgent = [desk.queued(priority="high") for _ in range(2)]
    windows = Windows(32)
    send(ledger, windows)
    assert ledger.raise_aged(3600, windows) == 0
    assert ledger.raise_aged(-10, windows) == 2, "one in sixteen places of the window"
    assert ledger.raise_aged(-10, windows) == 0
    rows = ledger.outbox(10, windows)
    assert {row.priority for row in rows} == {"high"}
    assert {row.job_id for row in rows} < set(low)
    ledger.sent([row.id for row in rows])
    ledger.check()
    desk.claimed(rows[0].job_id)
    assert ledger.raise_aged(-10, windows) == 1
    assert not set(urgent) & {row.job_id for row in ledger.outbox(10, windows)}


def test_a_job_that_is_handed_back_waits_in_its_own_class_again(ledger: Ledger, desk: Any) -> None:
    job_id = desk.queued(priority="low")
    send(ledger, Windows())
    assert ledger.raise_aged(-10) == 1
    lease = desk.claimed(job_id)
    ledger.release([lease])
    assert [row.priority for row in ledger.outbox(10)] == ["low"]


def test_rows_of_an_older_version_are_sent(ledger: Ledger, desk: Any, sql: Any) -> None:
    """During an upgrade doors and relays of the version before are still at work."""
    job_id = desk.queued(priority="low")
    sql("UPDATE outbox SET line = NULL")
    [row] = ledger.outbox(10)
    assert (row.job_id, row.priority) == (job_id, "low")
    ledger.sent([row.id])
    assert [row.job_id for row in ledger.queued("m", -1, 10)] == [job_id]
    assert send(ledger, Windows(1)) == []


def test_a_line_is_read_as_it_was_written() -> None:
    line = Line("org/model.x:1", Priority.LOW, "a_b-c")
    assert Line.parse(str(line)) == line
