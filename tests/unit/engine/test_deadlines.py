from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.deadlines import Deadlines


def test_they_pass_in_order_and_once() -> None:
    deadlines = Deadlines()
    for name, at_s in [("c", 3.0), ("a", 1.0), ("b", 2.0)]:
        deadlines.add(name, at_s)
    assert deadlines.next_s == 1.0
    assert deadlines.passed(0.5) == []
    assert deadlines.passed(2.0) == ["a", "b"]
    assert deadlines.passed(9.0) == ["c"]
    assert (deadlines.next_s, len(deadlines)) == (None, 0)


def test_one_that_ended_before_is_not_reported() -> None:
    deadlines = Deadlines()
    deadlines.add("a", 1.0)
    deadlines.add("b", 2.0)
    deadlines.discard("a")
    deadlines.discard("nobody")
    assert deadlines.next_s == 2.0
    deadlines.add("a", 5.0)
    assert deadlines.passed(3.0) == ["b"]
    assert deadlines.passed(5.0) == ["a"]


def test_requests_that_end_long_before_their_deadline_leave_nothing_behind() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.add(str(number), 1e9 + number)
        deadlines.discard(str(number))
    assert len(deadlines._heap) < 100


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["add", "discard", "pass"]), st.integers(0, 20))))
def test_it_is_a_map_with_an_order(operations: list[tuple[int, str, int]]) -> None:
    deadlines = Deadlines()
    model: dict[str, float] = {}
    for number, operation, at in operations:
        name = str(number)
        if operation == "add" and name not in model:
            deadlines.add(name, at)
            model[name] = at
        elif operation == "discard":
            deadlines.discard(name)
            model.pop(name, None)
        elif operation == "pass":
            due = {n for n, at_s in model.items() if at_s <= at}
            assert set(deadlines.passed(at)) == due
            model = {n: at_s for n, at_s in model.items() if n not in due}
        assert deadlines.next_s == min(model.values(), default=None)
