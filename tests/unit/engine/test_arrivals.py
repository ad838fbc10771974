"""Requests on their way into the engine: in order, each kind for itself, and none that was taken back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from engine.arrivals import Arrivals, Work
from engine.request import EngineRequest, SamplingParams


class Desk:
    """Prepares nothing, but waits for slow requests' permission; keeps what was delivered, with its thread's name."""

    def __init__(self) -> None:
        self.delivered: list[tuple[str, str]] = []
        self.began = threading.Semaphore(0)
        self.permitted = threading.Semaphore(0)
        self._changed = threading.Condition()
        self.arrivals = Arrivals(self.prepare, self.compiles, self.deliver)

    def prepare(self, request: EngineRequest, arrived_s: float) -> Work:
        assert arrived_s == 1.5
        if str(request.prompt).startswith("slow"):
            self.began.release()
            assert self.permitted.acquire(timeout=60)
        name = f"{request.prompt}"
        return lambda: self.delivered.append((name, threading.current_thread().name))

    @staticmethod
    def compiles(request: EngineRequest) -> bool:
        if request.prompt == "broken":
            raise RuntimeError("nobody knows")
        return str(request.prompt).startswith("slow")

    def deliver(self, work: Work) -> None:
        with self._changed:
            work()
            self._changed.notify_all()

    def wait(self, count: int) -> list[str]:
        """What was delivered once there is so much of it."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.delivered) >= count, 60), self.delivered
        return [name for name, _ in self.delivered]

    def put(self, prompt: str, id: str | None = None) -> None:  # noqa: A002
        self.arrivals.put(EngineRequest(id or prompt, SamplingParams(), prompt), 1.5)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    desk.arrivals.start()
    yield desk
    for _ in range(9):
        desk.permitted.release()
    desk.arrivals.stop()


def test_each_kind_keeps_its_order_and_has_its_thread(desk: Desk) -> None:
    for prompt in ("slow 1", "a", "slow 2", "b", "broken"):
        desk.put(prompt)
    assert desk.wait(3) == ["a", "b", "broken"]
    desk.permitted.release()
    desk.permitted.release()
    assert desk.wait(5)[3:] == ["slow 1", "slow 2"]
    assert [thread for _, thread in desk.delivered] == ["engine-prepare"] * 3 + ["engine-compile"] * 2


def test_what_was_taken_back_is_not_delivered_whatever_comes_with_its_id(desk: Desk) -> None:
    desk.put("slow 1", "one")
    desk.put("slow 2", "two")
    assert desk.began.acquire(timeout=60)
    for name, prompt in (("one", "slow 1"), ("two", "slow 2")):
        taken = desk.arrivals.take_back(name)
        assert taken is not None
        assert taken.request.prompt == prompt
        assert desk.arrivals.take_back(name) is None
    desk.put("slow 3", "one")
    desk.put("quick", "two")
    desk.permitted.release()
    desk.permitted.release()
    assert sorted(desk.wait(2)) == ["quick", "slow 3"]


def test_only_what_waits_for_no_compiler_comes_soon(desk: Desk) -> None:
    desk.put("slow")
    assert desk.began.acquire(timeout=60)
    assert not desk.arrivals.soon
    idle = Arrivals(desk.prepare, desk.compiles, desk.deliver)
    idle.put(EngineRequest("a", SamplingParams(), "a"), 1.5)
    assert idle.soon


def test_what_is_left_can_be_taken_back_together(desk: Desk) -> None:
    desk.put("slow 1")
    assert desk.began.acquire(timeout=60)
    desk.put("slow 2")
    desk.put("a")
    desk.wait(1)
    left = desk.arrivals.take_all_back()
    assert sorted(arrival.request.id for arrival in left) == ["slow 1", "slow 2"]
    desk.permitted.release()
    desk.put("b")
    assert desk.wait(2) == ["a", "b"]
    assert desk.arrivals.take_all_back() == []


def test_it_stops_while_something_is_prepared() -> None:
    other = Desk()
    other.arrivals.start()
    other.put("slow")
    assert other.began.acquire(timeout=60)
    stopping = threading.Thread(target=other.arrivals.stop)
    stopping.start()
    other.permitted.release()
    stopping.join(60)
    assert not stopping.is_alive()
    assert other.wait(1) == ["slow"]
