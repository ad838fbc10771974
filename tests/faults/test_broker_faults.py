"""The broker is harmed in every way while jobs stand at each point: each ends once, and new ones run at once after."""

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
from tests.workers import eventually

pytestmark = pytest.mark.slow

AWAY_S = 1.5
BACK_S = 5.0
"""New jobs run within this after the broker's return."""
SLACK_S = 2.0
"""What the machine may take of its own for a job and for looking."""


@contextlib.contextmanager
def restarted(stage: Stage) -> Iterator[None]:
    stage.broker.kill(signal.SIGTERM)
    yield
    stage.broker.start()


@contextlib.contextmanager
def crashed(stage: Stage) -> Iterator[None]:
    stage.broker.kill(signal.SIGKILL)
    yield
    stage.broker.start()


@contextlib.contextmanager
def wiped(stage: Stage) -> Iterator[None]:
    stage.broker.flush()
    yield


@contextlib.contextmanager
def frozen(stage: Stage) -> Iterator[None]:
    stage.broker.kill(signal.SIGSTOP)
    yield
    stage.broker.kill(signal.SIGCONT)


@contextlib.contextmanager
def cut_off(stage: Stage) -> Iterator[None]:
    """Every connection is reset, the server lives."""
    stage.place.redis.client_kill_filter(_type="normal", skipme=True)
    yield


@contextlib.contextmanager
def full(stage: Stage) -> Iterator[None]:
    """Out of memory, and told to throw nothing away."""
    stage.place.redis.config_set("maxmemory", "1")
    yield
    stage.place.redis.config_set("maxmemory", "0")


@contextlib.contextmanager
def demoted(stage: Stage) -> Iterator[None]:
    """A replica that only reads, as after a switch-over that the URL didn't follow."""
    stage.place.redis.replicaof("127.0.0.1", "1")
    yield
    stage.place.redis.replicaof("NO", "ONE")


FAULTS: tuple[Callable[[Stage], AbstractContextManager[None]], ...] = (
    restarted, crashed, wiped, frozen, cut_off, full, demoted,
)  # fmt: skip
USUAL = {
    (restarted, "before acknowledgement"),
    (wiped, "after claim"),
    (frozen, "first token"),
    (full, "before result"),
    (demoted, "after commit"),
}
"""What the suite runs; `make faults` runs every fault at every point."""

CELLS = [
    pytest.param(fault, point.name, marks=() if (fault, point.name) in USUAL else (pytest.mark.faults,))
    for fault, point in itertools.product(FAULTS, WORK)
]


@pytest.mark.parametrize(("fault", "point"), CELLS)
def test_every_job_ends_once(stage: Stage, fault: Callable[[Stage], AbstractContextManager[None]], point: str) -> None:
    """celery 10302: a worker that lives, and never consumes again.

    Jobs are accepted meanwhile: what is published later is in the outbox until then.
    """
    stage.strike(point, Strike.HOLD, lambda: stage.submit(2))
    with fault(stage):
        stage.points.clear()
        stage.submit(1)
        time.sleep(AWAY_S)
    back_s = time.monotonic()
    [new] = stage.submit(1)
    stage.place.ended(new, within_s=BACK_S + SLACK_S)
    assert time.monotonic() - back_s < BACK_S + SLACK_S
    stage.assert_clean(within_s=45)


USUAL_AT_THE_DOOR = {(full, "before publish"), (wiped, "after publish")}
DOOR_CELLS = [
    pytest.param(fault, point.name, marks=() if (fault, point.name) in USUAL_AT_THE_DOOR else (pytest.mark.faults,))
    for fault, point in itertools.product(FAULTS, SUBMISSION)
]


@pytest.mark.parametrize(("fault", "point"), DOOR_CELLS)
def test_what_is_being_submitted_is_kept(
    stage: Stage, fault: Callable[[Stage], AbstractContextManager[None]], point: str
) -> None:
    """What is accepted is in the ledger, and its message is sent, or sent again, once it can be."""
    stage.strike_submission(point, fault(stage), AWAY_S)
    assert {job.attempt for job in stage.assert_clean(within_s=45)} == {1}


@pytest.mark.faults
def test_a_broker_is_frozen_for_longer_than_its_messages_are_stamped(stage: Stage) -> None:
    """kombu 337: messages are handed out again while their jobs run."""
    with stage.submitting(4, max_tokens=1500) as submission:
        ids = submission.result()
    stage.place.running(*ids)
    with frozen(stage):
        time.sleep(9)
    jobs = eventually(lambda: stage.ended(within_s=40), 1, "all end")
    assert {job.attempt for job in jobs} == {1}
    stage.assert_clean(within_s=45)
