from __future__ import annotations

import pytest

from engine.fairness import FairShare
from engine.sequence import TokenSequence
from engine.waiting import WaitingQueue


def sequence(arrival: int, priority: int = 0, tenant: str = "default") -> TokenSequence:
    return TokenSequence(
        id=str(arrival), tokens=[0], prompt_tokens=1, max_len=2, priority=priority, tenant=tenant, arrival=arrival
    )


@pytest.fixture
def queue() -> WaitingQueue:
    return WaitingQueue(FairShare(), aging_s=10.0)


def order(queue: WaitingQueue, now_s: float = 0.0) -> list[int]:
    queue.check()
    return [s.arrival for s in queue.in_order(now_s)]


def test_order_is_by_priority_then_arrival(queue: WaitingQueue) -> None:
    for arrival, priority in enumerate([3, 0, 3, -1, 0]):
        queue.push(sequence(arrival, priority), 0.0)
    assert order(queue) == [3, 1, 4, 0, 2]
    assert len(queue) == 5
    assert queue.most_urgent == -1
    assert queue.by_priority() == {3: 2, 0: 2, -1: 1}
    assert [s.arrival for s in queue.in_order(0.0, priority=3)] == [0, 2]


def test_who_was_preempted_is_before_all_others_of_its_class(queue: WaitingQueue) -> None:
    """https://github.com/vllm-project/vllm/issues/41951"""
    queue.push(sequence(2), 0.0)
    queue.push(sequence(3, -1), 0.0)
    queue.push_front(sequence(5), 0.0)
    queue.push_front(sequence(4, 1), 0.0)
    queue.push_front(sequence(1), 0.0)
    assert order(queue) == [3, 1, 5, 2, 4]
    assert queue.returning == 3


def test_any_member_can_leave_and_a_stranger_cannot(queue: WaitingQueue) -> None:
    members = [sequence(n) for n in range(3)]
    for member in members:
        queue.push(member, 0.0)
    queue.remove(members[1])
    assert order(queue) == [0, 2]
    assert members[1] not in queue
    with pytest.raises(ValueError, match="doesn't wait"):
        queue.remove(members[1])
    queue.remove(members[0])
    queue.remove(members[2])
    assert order(queue) == []
    assert (len(queue), queue.most_urgent) == (0, None)


def test_those_that_are_given_out_may_be_removed_at_once(queue: WaitingQueue) -> None:
    members = [sequence(n, priority=n % 2) for n in range(6)]
    for member in members:
        queue.push(member, 0.0)
    seen = []
    for member in queue.in_order(0.0):
        seen.append(member.arrival)
        if member.arrival != 2:
            queue.remove(member)
    assert seen == [0, 2, 4, 1, 3, 5]
    assert order(queue) == [2]


class TestAging:
    def test_a_request_rises_by_one_class_each_time(self, queue: WaitingQueue) -> None:
        low, high = sequence(1, priority=2), sequence(2, priority=0)
        queue.push(low, 0.0)
        queue.push(high, 19.0)
        assert [queue.level(low, now_s) for now_s in (0.0, 9.9, 10.0, 19.9, 20.0, 30.0)] == [2, 2, 1, 1, 0, -1]
        assert order(queue, 19.9) == [2, 1]
        assert order(queue, 20.0) == [1, 2]

    def test_who_returns_ages_too_from_the_class_that_it_had(self, queue: WaitingQueue) -> None:
        low, high = sequence(1, priority=2), sequence(2, priority=0)
        low.level = 1
        queue.push_front(low, 100.0)
        queue.push(high, 105.0)
        assert order(queue, 105.0) == [2, 1]
        assert order(queue, 110.0) == [1, 2]

    def test_the_oldest_is_known(self, queue: WaitingQueue) -> None:
        assert queue.oldest_s == float("inf")
        queue.push(sequence(1), 3.0)
        queue.push(sequence(2, priority=-1), 5.0)
        assert queue.oldest_s == 3.0
        queue.push_front(sequence(0), 2.0)
        assert queue.oldest_s == 2.0


class TestTenants:
    def test_take_turns_while_they_are_charged(self) -> None:
        shares = FairShare()
        queue = WaitingQueue(shares)
        for arrival in range(6):
            queue.push(sequence(arrival, tenant="many"), 0.0)
        for arrival in range(6, 8):
            queue.push(sequence(arrival, tenant="few"), 0.0)
        seen = []
        for member in queue.in_order(0.0):
            seen.append(member.arrival)
            queue.remove(member)
            shares.begin(member.tenant, 10)
        assert seen == [0, 6, 1, 7, 2, 3, 4, 5]

    def test_are_served_within_a_class_only(self) -> None:
        shares = FairShare()
        queue = WaitingQueue(shares)
        queue.push(sequence(1, tenant="many"), 0.0)
        queue.push(sequence(2, priority=1, tenant="few"), 0.0)
        shares.charge("many", 10_000)
        assert order(queue) == [1, 2]
