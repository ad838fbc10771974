from __future__ import annotations

from engine.sequence import TokenSequence
from engine.waiting import WaitingQueue


def sequence(arrival: int, priority: int = 0) -> TokenSequence:
    return TokenSequence(id=str(arrival), tokens=[0], prompt_tokens=1, max_len=2, priority=priority, arrival=arrival)


def test_order_is_by_priority_then_arrival() -> None:
    queue = WaitingQueue()
    for arrival, priority in enumerate([3, 0, 3, -1, 0]):
        queue.push(sequence(arrival, priority))
    assert [s.arrival for s in queue] == [3, 1, 4, 0, 2]
    assert queue.first() is next(iter(queue))
    assert len(queue) == 5


def test_the_front_is_the_front_of_the_class() -> None:
    queue = WaitingQueue()
    urgent, second, first = sequence(3, -1), sequence(2), sequence(1)
    queue.push(second)
    queue.push(urgent)
    queue.push_front(first)
    assert list(queue) == [urgent, first, second]


def test_any_member_can_leave() -> None:
    queue = WaitingQueue()
    members = [sequence(n) for n in range(3)]
    for member in members:
        queue.push(member)
    queue.remove(members[1])
    assert list(queue) == [members[0], members[2]]
    assert members[1] not in queue
    queue.remove(members[0])
    queue.remove(members[2])
    assert queue.first() is None
    assert len(queue) == 0
