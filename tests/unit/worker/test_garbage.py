"""What a worker has loaded is looked through once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from worker import garbage


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)
    gc.enable()


def test_what_is_loaded_is_left_alone_from_then_on() -> None:
    garbage.postpone()
    assert not gc.isenabled()
    loaded = [object()]
    garbage.resume()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000
    assert not any(one is loaded for one in gc.get_objects())


def test_what_loading_left_behind_is_collected() -> None:
    class Loaded:
        """It refers to itself."""

    garbage.postpone()
    one = Loaded()
    one.itself = one  # type: ignore[attr-defined]
    left = weakref.ref(one)
    del one
    assert left() is not None
    garbage.resume()
    assert left() is None


def test_few_looks_are_taken_at_what_jobs_leave_behind() -> None:
    garbage.resume()
    looked = gc.get_stats()[0]["collections"]
    jobs = [[number] for number in range(5 * garbage.YOUNG)]
    assert gc.get_stats()[0]["collections"] - looked <= 5
    assert len(jobs) == 5 * garbage.YOUNG
