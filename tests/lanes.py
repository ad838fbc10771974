"""The whole suite in three lanes side by side: two compute, the last waits for processes, and then helps the others.

`python -m tests.lanes` shows the first lane while it runs, and then the others. Arguments go to every pytest.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

PYTEST = (sys.executable, "-m", "pytest", "-q")
PROCESSES = ("tests/integration", "tests/faults")
TRITON = "tests/unit/kernels/triton"
ON_SERVERS = ("--database", "postgres", "--broker", "redis")
LANES = {
    "what is interpreted, and compiled for GPUs": [(TRITON,)],
    "what computes, then jobs on Redis and PostgreSQL": [
        ("tests", *(f"--ignore={place}" for place in (*PROCESSES, TRITON))),
        ("tests/unit/ledger", *ON_SERVERS),
        ("tests/integration", *ON_SERVERS),
    ],
    "what starts processes, then faults on Redis and PostgreSQL": [PROCESSES, ("tests/faults", *ON_SERVERS)],
}
POLL_S = 0.1


class Lane:
    """Commands that run one after the other, then the last ones that others have left; `status` is the first one's
    that failed, or 0.
    """

    def __init__(self, name: str, commands: Sequence[Sequence[str]], others: Sequence[Lane], log: Path | None) -> None:
        """Output goes to `log`, or where this process's goes."""
        self.name = name
        self.left = deque(commands)
        self.others = others
        self.log = log
        self.status = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=name)
        if log is not None:
            log.touch()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def end(self, number: signal.Signals) -> None:
        """Pass a signal on to the command that runs, and start no other one."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                with suppress(ProcessLookupError):
                    self._process.send_signal(number)

    def follow(self) -> None:
        """Return when the lane is over; until then copy its log, if it has one, to this process's output."""
        if self.log is None:
            while not self.is_over:
                self._thread.join(POLL_S)
            return
        print(f"\n== {self.name}", flush=True)
        with self.log.open("rb") as lines:
            over = False
            while not over:
                over = self.is_over
                sys.stdout.buffer.write(lines.read())
                sys.stdout.buffer.flush()
                self._thread.join(POLL_S)

    def _next(self) -> Sequence[str] | None:
        for take in (self.left.popleft, *(other.left.pop for other in self.others)):
            with suppress(IndexError):
                return take()
        return None

    def _run(self) -> None:
        output = None if self.log is None else self.log.open("ab")
        while command := self._next():
            with self._lock:
                if self._stopped:
                    break
                self._process = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT if output else None, start_new_session=True
                )
            self.status = self._process.wait() or self.status
        if output is not None:
            output.close()


def run(lanes: dict[str, Sequence[Sequence[str]]]) -> int:
    """Run lanes side by side and return the status to exit with. Ctrl-C interrupts all of them, a second one kills.

    A lane that is done helps those before it.
    """
    interrupts = 0
    with tempfile.TemporaryDirectory(prefix="headrace-lanes-") as place:
        running: list[Lane] = []
        for number, (name, commands) in enumerate(lanes.items()):
            log = Path(place) / f"{number}.log" if number else None
            running.append(Lane(name, commands, tuple(running), log))

        def end_all(number: int, frame: FrameType | None) -> None:
            nonlocal interrupts
            interrupts += 1
            for lane in running:
                lane.end(signal.SIGINT if interrupts == 1 else signal.SIGKILL)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, end_all)
        for lane in running:
            lane.start()
        for lane in running:
            lane.follow()
    if interrupts:
        return 128 + signal.SIGINT
    return next((lane.status for lane in running if lane.status), 0)


def main() -> None:
    began_s = time.monotonic()
    status = run({name: [(*PYTEST, *part, *sys.argv[1:]) for part in parts] for name, parts in LANES.items()})
    minutes = (time.monotonic() - began_s) / 60
    print(f"\nThe whole suite {'failed' if status else 'passed'} in {minutes:.1f} minutes")
    sys.exit(status)


if __name__ == "__main__":
    main()
