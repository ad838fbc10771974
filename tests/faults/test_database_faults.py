"""The database is harmed while jobs stand at each point of their life."""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.faults.points import SUBMISSION, WORK, Strike
from tests.faults.stage import Stage
from tests.outage import outage

pytestmark = pytest.mark.slow

AWAY_S = 1.5
BACK_S = 5.0
SLACK_S = 3.0


@contextlib.contextmanager
def restarted(stage: Stage) -> Iterator[None]:
    """Stopped and started; of SQLite, which has no server, somebody keeps the one lock."""
    if stage.postgres is None:
        with outage(stage.place.database_url):
            yield
        return
    stage.postgres.stop()
    yield
    stage.postgres.start()


@contextlib.contextmanager
def crashed(stage: Stage) -> Iterator[None]:
    assert stage.postgres is not None
    stage.postgres.signal(signal.SIGKILL)
    yield
    stage.postgres.start()


@contextlib.contextmanager
def frozen(stage: Stage) -> Iterator[None]:
    assert stage.postgres is not None
    stage.postgres.signal(signal.SIGSTOP)
    yield
    stage.postgres.signal(signal.SIGCONT)


Fault = Callable[[Stage], AbstractContextManager[None]]
USUAL = {(restarted, "before commit"), (frozen, "after commit")}
CELLS = [
    pytest.param(fault, point.name, marks=() if (fault, point.name) in USUAL else (pytest.mark.faults,))
    for fault, point in itertools.product((restarted, crashed, frozen), WORK)
]


@pytest.mark.parametrize(("fault", "point"), CELLS)
def test_every_job_ends_once(stage: Stage, fault: Fault, point: str) -> None:
    """Running jobs end, their outcomes wait, and what is submitted meanwhile is repeated until it is accepted."""
    if stage.postgres is None and fault is not restarted:
        pytest.skip("SQLite has no server")
    stage.strike(point, Strike.HOLD, lambda: stage.submit(2))
    with contextlib.ExitStack() as end:
        with fault(stage):
            stage.points.clear()
            submission = end.enter_context(stage.submitting(1))
            time.sleep(AWAY_S)
        back_s = time.monotonic()
        submission.result(timeout=30)
    [new] = stage.submit(1)
    stage.place.ended(new, within_s=BACK_S + SLACK_S)
    assert time.monotonic() - back_s < BACK_S + SLACK_S
    stage.assert_clean(within_s=45)


USUAL_AT_THE_DOOR = {(restarted, "after submit")}
DOOR_CELLS = [
    pytest.param(fault, point.name, marks=() if (fault, point.name) in USUAL_AT_THE_DOOR else (pytest.mark.faults,))
    for fault, point in itertools.product((restarted, crashed, frozen), SUBMISSION)
]


@pytest.mark.parametrize(("fault", "point"), DOOR_CELLS)
def test_what_is_being_submitted_is_accepted_once(stage: Stage, fault: Fault, point: str) -> None:
    """Whoever submits repeats it until there is an answer, and one job comes of it."""
    if stage.postgres is None and fault is not restarted:
        pytest.skip("SQLite has no server")
    before = set(stage.stories())
    stage.strike_submission(point, fault(stage), AWAY_S)
    assert {job.attempt for job in stage.assert_clean(within_s=45)} == {1}
    assert set(stage.stories()) - before == set(stage.accepted), "a submission that was repeated is one job"
