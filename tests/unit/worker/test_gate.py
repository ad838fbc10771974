"""Who may be in the engine: never anybody beside a job that has to be alone, and nobody waits for ever."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from worker.gate import Gate


class Visitor:
    """Stands for a slot: the gate only tells slots apart."""

    def __init__(self, alone: bool) -> None:
        self.alone = alone
        self.called = 0


def come(gate: Gate, *, alone: bool = False) -> Any:
    visitor: Any = Visitor(alone)

    def done(_: None) -> None:
        visitor.called += 1

    (gate.enter_alone if alone else gate.enter)(visitor, done)
    return visitor


def test_jobs_enter_together_until_one_has_to_be_alone() -> None:
    gate = Gate()
    first, second = come(gate), come(gate)
    assert gate.holds(first)
    assert gate.holds(second)
    lone, late = come(gate, alone=True), come(gate)
    assert gate.closed
    assert not gate.holds(lone)
    gate.leave(first)
    assert not gate.holds(lone), "one is inside still"
    gate.leave(second)
    assert gate.holds(lone)
    assert not gate.holds(late)
    gate.leave(lone)
    assert gate.holds(late)
    assert not gate.closed


def test_those_that_waited_go_before_the_next_that_has_to_be_alone() -> None:
    gate = Gate()
    lone, next_lone, ordinary = come(gate, alone=True), come(gate, alone=True), come(gate)
    gate.leave(lone)
    assert gate.holds(ordinary)
    assert not gate.holds(next_lone)
    gate.leave(ordinary)
    assert gate.holds(next_lone)


def test_a_job_that_is_stopped_waits_no_longer() -> None:
    gate = Gate()
    inside, lone, ordinary = come(gate), come(gate, alone=True), come(gate)
    gate.wake(lone)
    assert (lone.called, gate.holds(lone)) == (1, False)
    assert gate.holds(ordinary), "nobody has to be alone any more"
    gate.leave(inside)
    gate.leave(lone)
    assert not gate.closed


class GateMachine(RuleBasedStateMachine):
    """Any order of arrivals, ends and stops."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.here: list[Any] = []

    @rule(alone=st.booleans())
    def arrive(self, alone: bool) -> None:
        self.here.append(come(self.gate, alone=alone))

    @rule(which=st.integers(0, 20), stop=st.booleans())
    def go(self, which: int, stop: bool) -> None:
        if self.here:
            visitor = self.here.pop(which % len(self.here))
            if stop:
                self.gate.wake(visitor)
            self.gate.leave(visitor)

    @invariant()
    def a_lone_job_is_alone(self) -> None:
        inside = [visitor for visitor in self.here if self.gate.holds(visitor)]
        assert len(inside) == 1 or not any(visitor.alone for visitor in inside)
        assert all(visitor.called == self.gate.holds(visitor) for visitor in self.here)
        assert inside or not self.here, "somebody waits for nobody"


TestGate = GateMachine.TestCase
TestGate.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
