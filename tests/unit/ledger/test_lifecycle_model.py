"""The promises of a job's life, over every order of steps and faults of the model in `tests.model.lifecycle`."""

from __future__ import annotations

import pytest

from tests.model.lifecycle import GUARDS, explore

BROKEN = {
    "the fence at commit": "a lost lease committed",
    "the commit before the acknowledgement": "acknowledged before the commit",
    "the reaper": "nothing happens any more, and the job or a message of it is left",
    "the reconciler": "nothing happens any more, and the job or a message of it is left",
    "the cancellation at the claim": "a cancelled job ran again",
    "the cancellation at the reaper": "a cancellation was forgotten",
    "the count of attempts": "attempts out of bounds",
}


def test_every_order_of_steps_and_faults_keeps_every_promise() -> None:
    states, found = explore()
    assert found is None, str(found)
    assert states > 5_000, "the model does not reach what it was made for"


def test_no_guard_is_left_out() -> None:
    assert set(BROKEN) == set(GUARDS)


@pytest.mark.parametrize("guard", BROKEN)
def test_each_guard_is_needed(guard: str) -> None:
    """The model can fail: without a guard there is a way to break a promise, and it is shown."""
    _, found = explore(frozenset({guard}))
    assert found is not None, f"nothing breaks without {guard}"
    assert found.promise == BROKEN[guard], str(found)
    assert 1 < len(found.trace) < 30
