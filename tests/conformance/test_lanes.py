"""`make test` runs the suite in lanes side by side: none of their output is lost, nor a failure, nor a Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lanes import LANES, ON_SERVERS

ROOT = Path(__file__).parents[2]
RUN = "import json, sys; from tests.lanes import run; sys.exit(run(json.loads(sys.argv[1])))"
IMPORTS = "import pathlib, sys, time\n"
WAIT = "\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('cleans up')\n    sys.exit(2)"


def start(lanes: dict[str, list[str]]) -> subprocess.Popen[str]:
    """A process that runs lanes of Python programs."""
    commands = {name: [[sys.executable, "-c", IMPORTS + code] for code in codes] for name, codes in lanes.items()}
    return subprocess.Popen(
        [sys.executable, "-c", RUN, json.dumps(commands)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


class Sign:
    """What one lane's program gives, and another's waits for."""

    def __init__(self, place: Path) -> None:
        file = f"pathlib.Path({str(place / 'sign')!r})"
        self.give, self.wait = f"{file}.touch()\n", f"while not {file}.exists(): time.sleep(0.01)\n"


@pytest.fixture
def sign(tmp_path: Path) -> Sign:
    return Sign(tmp_path)


def test_one_lane_is_shown_after_the_other(sign: Sign) -> None:
    last = sign.give + "time.sleep(0.5); print('a2')"
    process = start({"a": ["print('a1')", last], "b": [sign.wait + "print('b1')", "print('b2')"]})
    told, _ = process.communicate(timeout=30)
    assert told.split() == ["a1", "a2", "==", "b", "b1", "b2"]
    assert process.returncode == 0


def test_a_lane_that_is_done_takes_the_last_of_what_the_other_has_left(sign: Sign) -> None:
    last = sign.give + "print('a3'); time.sleep(1)"
    process = start({"a": [sign.wait + "print('a1')", "print('a2')", last], "b": ["print('b1')"]})
    told, _ = process.communicate(timeout=30)
    assert told.split() == ["a1", "a2", "==", "b", "b1", "a3"]
    assert process.returncode == 0


@pytest.mark.parametrize("at", ["a", "b"])
def test_a_failure_in_any_lane_is_told_and_the_rest_still_runs(at: str, sign: Sign) -> None:
    first = {name: "sys.exit(3)" if name == at else "0" for name in "ab"}
    process = start({"a": [first["a"], sign.give + "print('a2')"], "b": [sign.wait + first["b"], "print('b2')"]})
    told, _ = process.communicate(timeout=30)
    assert told.split() == ["a2", "==", "b", "b2"]
    assert process.returncode == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_lanes_and_starts_nothing_more(number: signal.Signals, tmp_path: Path) -> None:
    ready = f"pathlib.Path({str(tmp_path / 'ready')!r})"
    first = f"try:\n    while not {ready}.exists(): time.sleep(0.01)\n    print('waits', flush=True)" + WAIT
    second = f"try:\n    {ready}.touch()" + WAIT
    process = start({"a": [first, "print('never')"], "b": [second, "print('never')"]})
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(number)
    told, _ = process.communicate(timeout=30)
    assert told.split("\n") == ["cleans up", "", "== b", "cleans up", ""]
    assert process.returncode == 130


def test_the_lanes_hold_every_folder_of_tests_and_what_goes_by_the_servers_again() -> None:
    parts = [part for lane in LANES.values() for part in lane]
    [most] = [part for part in parts if part[0] == "tests"]
    left_out = {option.removeprefix("--ignore=") for option in most[1:]}
    for folder in left_out:
        assert (ROOT / folder).is_dir()
        assert [part[-4:] == ON_SERVERS for part in parts if folder in part].count(False) == 1
    for folder in ("tests/unit/ledger", "tests/integration", "tests/faults"):
        assert [part[-4:] == ON_SERVERS for part in parts if folder in part].count(True) == 1
