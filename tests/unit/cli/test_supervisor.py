"""Children are started, watched, restarted and stopped; none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cli import supervisor as module
from cli.output import Failure
from cli.supervisor import Line, Service, State, Supervisor, describe

SLEEP = "import time; print('hello', flush=True); time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)


def service(code: str, ready: Callable[[], bool] = lambda: True, **options: float) -> Service:
    return Service("child", (sys.executable, "-c", code), ready, **options)  # type: ignore[arg-type]


class Bench:
    """A supervisor and what it said."""

    def __init__(self, tmp_path: Path) -> None:
        self.lines: list[Line] = []
        self.reports: list[str] = []
        self.interrupted = threading.Event()
        self.supervisor = Supervisor(tmp_path / "logs", self.lines.append, self.reports.append, self.interrupted)
        self.log = tmp_path / "logs" / "child.log"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.supervisor.hurry()
    bench.supervisor.stop([])


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_child_runs_in_a_process_group_of_its_own_and_its_output_is_kept(bench: Bench) -> None:
    child = bench.supervisor.start(service(SLEEP))
    bench.supervisor.wait_ready([child])
    assert child.state is State.READY
    assert child.pid is not None
    assert os.getpgid(child.pid) == child.pid
    until(lambda: Line("child", "hello") in bench.lines)
    assert bench.log.read_text() == "hello\n"


def test_the_log_of_the_run_before_is_kept(bench: Bench) -> None:
    bench.log.write_text("old\n")
    bench.supervisor.start(service(SLEEP))
    assert bench.log.with_suffix(".log.1").read_text() == "old\n"


def test_stopping_asks_first(bench: Bench) -> None:
    child = bench.supervisor.start(service(SLEEP))
    bench.supervisor.stop(["child"])
    assert child.exit_status() == -signal.SIGTERM
    assert child.state is State.STOPPED


def test_a_child_that_ignores_sigterm_is_killed_when_its_time_is_up(bench: Bench) -> None:
    child = bench.supervisor.start(service(STUBBORN, stop_timeout_s=0.3))
    until(lambda: bench.lines)
    bench.supervisor.stop(["child"])
    assert child.exit_status() == -signal.SIGKILL


def test_a_second_signal_does_not_wait(bench: Bench) -> None:
    child = bench.supervisor.start(service(STUBBORN, stop_timeout_s=60))
    until(lambda: bench.lines)
    bench.supervisor.hurry()
    began_s = time.monotonic()
    bench.supervisor.stop(["child"])
    assert child.exit_status() == -signal.SIGKILL
    assert time.monotonic() - began_s < 5


def test_a_child_that_ends_during_start_up_fails_it_with_its_last_lines(bench: Bench) -> None:
    child = bench.supervisor.start(service("print('no model'); raise SystemExit(3)", lambda: False))
    with pytest.raises(Failure, match=r"(?s)exit status 3.*no model") as caught:
        bench.supervisor.wait_ready([child])
    assert str(bench.log) in (caught.value.hint or "")


def test_a_child_that_is_never_ready_fails_the_start(bench: Bench) -> None:
    child = bench.supervisor.start(service(SLEEP, lambda: False, ready_timeout_s=0.3))
    with pytest.raises(Failure, match="not ready after"):
        bench.supervisor.wait_ready([child])


def test_waiting_ends_when_told_to(bench: Bench) -> None:
    child = bench.supervisor.start(service(SLEEP, lambda: False))
    bench.interrupted.set()
    with pytest.raises(KeyboardInterrupt):
        bench.supervisor.wait_ready([child])


def test_a_child_that_dies_is_started_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 0.1)
    child = bench.supervisor.start(service(SLEEP))
    bench.supervisor.wait_ready([child])
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    changes: list[int | None] = []

    def changed() -> None:
        changes.append(child.pid)
        bench.interrupted.set()

    bench.supervisor.watch(changed)
    assert changes
    assert changes != [first]
    assert any("SIGKILL" in report for report in bench.reports)


def test_a_child_that_keeps_dying_stops_everything(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 0.05)
    monkeypatch.setattr(module, "POLL_S", 0.02)
    bench.supervisor.start(service("raise SystemExit(1)"))
    with pytest.raises(Failure, match="5 times in a row"):
        bench.supervisor.watch(lambda: None)


def test_children_are_stopped_in_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for name in ("broker", "api", "worker", "extra"):
        bench.supervisor.start(Service(name, (sys.executable, "-c", SLEEP), lambda: True))
    bench.supervisor.stop(["worker", "api", "broker"])
    assert bench.reports == ["stopping worker", "stopping api", "stopping broker", "stopping extra"]
    assert bench.supervisor.pids() == {}


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_no_child_survives_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import pathlib, sys, threading, time
        from cli.supervisor import Service, Supervisor
        run = Supervisor(pathlib.Path({str(tmp_path)!r}), lambda line: None, print, threading.Event())
        child = run.start(Service("child", (sys.executable, "-c", {STUBBORN!r}), lambda: True))
        while not child.tail:
            time.sleep(0.02)
        print(child.pid, flush=True)
        time.sleep(60)
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_exit_statuses_in_words() -> None:
    assert describe(3) == "exit status 3"
    assert describe(-9) == "SIGKILL"
    assert describe(-64) == "SIGRTMAX" or describe(-64) == "signal 64"
