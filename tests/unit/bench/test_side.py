"""A side's process does what it is asked, uses no processor while it is frozen, and leaves nothing behind."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import side as side_module
from bench.context import run
from bench.parts.workloads import agreement
from bench.peers.place import ROOT
from bench.side import Side, SideFailed, Sides, SideSpec, available_bytes, import_root
from bench.sides.protocol import Arrival
from bench.workload import Workload

WORK = Workload(((97, 98, 99), (100, 101)), 5)


def fake(name: str = "fake", need_bytes: int = 0, **config: Any) -> SideSpec:
    """Headrace with the fake model."""
    return SideSpec(
        name=name,
        title="Fake",
        module="headrace",
        python=Path(sys.executable),
        options={"config": {"model": "fake", **config}, "threads": 1},
        precision="bf16",
        weights_bytes=1,
        need_bytes=need_bytes,
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")])},
    )


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_module, "HOME", tmp_path)


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side(fake())
    yield made
    made.stop()


def pids() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_it_loads_runs_and_tells_its_memory(side: Side) -> None:
    side.load()
    assert side.facts["settings"]["model"] == "fake"
    first, again = run(side, WORK), run(side, WORK)
    assert [len(output) for output in first["outputs"]] == [5, 5]
    assert first["outputs"] == again["outputs"]
    assert first["seconds"] > 0
    assert 10e6 < first["peak_bytes"] < 2e9


def test_requests_arrive_when_they_are_due_and_those_not_awaited_are_dropped(side: Side) -> None:
    side.load()
    arrivals: list[Arrival] = [
        {"at_s": 0.0, "prompt": [97], "max_tokens": 4000, "awaited": False},
        {"at_s": 0.1, "prompt": [98], "max_tokens": 3, "awaited": True},
    ]
    endless, awaited = side.ask("play", arrivals=arrivals)
    assert len(awaited["token_s"]) == 3
    assert awaited["token_s"][0] >= 0.1
    assert 1 < len(endless["token_s"]) < 4000
    assert run(side, WORK), "nothing is left of the dropped one"


def test_a_mistake_is_told_and_the_side_goes_on(side: Side) -> None:
    side.load()
    with pytest.raises(SideFailed, match="fake: RequestRefused"):
        side.ask("run", prompts=[[999_999]], max_tokens=1)
    run(side, WORK)


def test_a_side_that_dies_is_no_answer(side: Side) -> None:
    side.load()
    with pytest.raises(SideFailed, match=r"no answer to `run`.*fake\.log"):
        side.ask("run", prompts=[list(b"<<die:0>>")], max_tokens=1)


def test_too_few_tokens_are_no_result(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    side.load()
    answer = run(side, WORK)
    monkeypatch.setattr(Side, "ask", lambda *_, **__: answer)
    with pytest.raises(SideFailed, match=r"gave \[5, 5\] tokens instead of 40"):
        run(side, Workload(WORK.prompts, 40))


def test_only_the_one_whose_turn_it_is_runs(tmp_path: Path) -> None:
    before = pids()
    with Sides([fake("one"), fake("two")]) as sides:
        for name in ("one", "two"):
            with sides.turn(name) as side:
                run(side, WORK)
        made = [psutil.Process(pid) for pid in pids() - before]
        assert len(made) == 2
        wait_for(lambda: all(process.status() == psutil.STATUS_STOPPED for process in made))
        with sides.turn("one") as side:
            run(side, WORK)
    assert pids() == before


def test_a_failed_side_has_no_further_turn() -> None:
    before = pids()
    with Sides([fake("broken", page_size=0), fake("whole")]) as sides:
        with pytest.raises(SideFailed, match="page_size"), sides.turn("broken"):
            pass
        assert sides.names == ["whole"]
        assert "page_size" in sides.failed["broken"]
        assert pids() == before


def test_a_side_makes_room_for_the_next() -> None:
    with Sides([fake("first"), fake("greedy", need_bytes=available_bytes())]) as sides:
        with sides.turn("first"):
            pass
        with sides.turn("greedy"):
            assert len(sides._resident) == 1
        with sides.turn("first") as side:
            assert run(side, WORK), "it comes back"


def test_an_interruption_leaves_no_process() -> None:
    before = pids()

    def interrupted() -> None:
        with Sides([fake("one"), fake("two")]) as sides:
            with sides.turn("one"):
                pass
            with sides.turn("two"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert pids() == before


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_a_frozen_side_dies_with_the_benchmark(tmp_path: Path) -> None:
    program = """
import os, pickle, sys
from pathlib import Path
from bench import side
side.HOME = Path(sys.argv[1])
made = side.Side(pickle.loads(sys.stdin.buffer.read()))
made.load()
made.freeze()
print(made._process.pid, flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        input=pickle.dumps(fake()),
        env={**os.environ, **fake().env},
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    wait_for(lambda: not psutil.pid_exists(int(done.stdout)))


def test_a_peer_sees_nothing_of_this_tree_but_bench() -> None:
    with import_root() as path:
        assert [entry.name for entry in path.iterdir()] == ["bench"]
        assert (path / "bench" / "sides" / "protocol.py").exists()


def test_agreement_counts_equal_beginnings() -> None:
    reference = {(1,): [5, 6, 7, 8], (2,): [5, 6, 7, 8]}
    found = agreement(reference, {(1,): [5, 6, 7, 8], (2,): [9, 6, 7, 8]})
    assert found == {"first_token": 0.5, "whole_output": 0.5, "equal_tokens": 2.0}
