"""A side's process as the benchmark holds it: asked, frozen while others have their turn, ended with everything."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.peers.place import HOME, ROOT

LOAD_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 20.0
SPARE_BYTES = 2 * 2**30
"""Memory that stays free when another side is loaded."""


class SideFailed(Exception):
    """A side gave no answer, or said what is wrong."""


@dataclass(frozen=True, slots=True)
class SideSpec:
    """How to start a side, and what it is."""

    name: str
    title: str
    module: str
    """In `bench.sides`."""
    python: Path
    options: Mapping[str, Any]
    precision: str
    """What its products are computed in: `bf16` or `int8`."""
    weights_bytes: int
    need_bytes: int
    """Memory that it takes at most."""
    env: Mapping[str, str] = field(default_factory=dict)
    kv_pool_bytes: int | None = None
    """What its cache of keys and values was given."""
    most_prompts: int | None = None
    """A slow side gets this many of the prompts, evenly spaced in length; its rate stands for all."""


class Side:
    """A running side."""

    def __init__(self, spec: SideSpec) -> None:
        self.spec = spec
        self.facts: dict[str, Any] = {}
        logs = HOME / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / f"{spec.name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(spec.python), "-P", "-m", f"bench.sides.{spec.module}", json.dumps(spec.options)],
                cwd=HOME,
                env={**os.environ, **spec.env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._buffer = b""

    def load(self) -> None:
        self.facts = self.ask("load", LOAD_TIMEOUT_S)

    def ask(self, do: str, timeout_s: float = ANSWER_TIMEOUT_S, **arguments: Any) -> Any:
        """The answer to a command."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._read_line(timeout_s)
        except BrokenPipeError:
            line = b""
        if not line:
            raise SideFailed(f"{self.spec.name} gave no answer to `{do}`; see {self._log}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise SideFailed(f"{self.spec.name}: {answer['error']}; see {self._log}")
        return answer

    def _read_line(self, timeout_s: float) -> bytes:
        """The next line, or nothing if the process ends or takes too long."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([pipe], [], [], timeout_s)
            chunk = os.read(pipe, 1 << 20) if ready else b""
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def freeze(self) -> None:
        """Stop it from using a processor at all: threads of an idle engine may spin."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self, patience_s: float = STOP_TIMEOUT_S) -> None:
        """End it and what it started; kill what is left after `patience_s`."""
        self.thaw()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class Sides:
    """The sides of a comparison: loaded at their first turn, kept while the memory allows, all stopped at the end."""

    def __init__(self, specs: Sequence[SideSpec]) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.failed: dict[str, str] = {}
        self._resident: dict[str, Side] = {}

    @property
    def names(self) -> list[str]:
        """Those that have not failed."""
        return [name for name in self.specs if name not in self.failed]

    @contextmanager
    def turn(self, name: str) -> Iterator[Side]:
        """One side alone runs, loaded. If it fails it is dropped, and has no further turn."""
        try:
            side = self._resident.get(name) or self._load(self.specs[name])
            side.thaw()
            yield side
            side.freeze()
        except SideFailed as failure:
            self.failed[name] = str(failure)
            if name in self._resident:
                self._resident.pop(name).stop()
            raise

    def _load(self, spec: SideSpec) -> Side:
        while self._resident and available_bytes() < spec.need_bytes + SPARE_BYTES:
            self._resident.pop(next(iter(self._resident))).stop()
        side = self._resident[spec.name] = Side(spec)
        side.load()
        return side

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for side in self._resident.values():
            side.stop(STOP_TIMEOUT_S if kind is None else 0.0)
        self._resident.clear()


def available_bytes() -> int:
    """Memory that can be had without swapping; without limit where that isn't known."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return 2**62


@contextmanager
def import_root() -> Iterator[Path]:
    """A directory from which `bench` can be imported, and nothing else of this tree.

    A peer must not find our `kernels` or `engine` in the place of a package that it looks for.
    """
    with tempfile.TemporaryDirectory(prefix="bench-path-") as directory:
        (Path(directory) / "bench").symlink_to(ROOT / "bench")
        yield Path(directory)
