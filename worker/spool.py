"""Outcomes that the database couldn't take, on disk: one JSON line each, synced before anyone relies on it.

A worker appends to a file of its own and holds a lock on it, so that the next worker that starts
with the same home can tell a file that was left behind from one in use.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import IO

from celery.utils.log import get_logger
from pydantic import TypeAdapter, ValidationError

from ledger.contract import Outcome

log = get_logger(__name__)
_line: TypeAdapter[Outcome] = TypeAdapter(Outcome)


class Spool:
    """This worker's file, made when it is first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory
        self._file: FileIO | None = None

    def append(self, outcomes: Sequence[Outcome]) -> None:
        """Write the outcomes and sync them to the disk, all of them or, with an OSError, none."""
        file = self._file or self._create()
        whole_bytes = file.tell()
        rest = memoryview(b"".join(_line.dump_json(outcome) + b"\n" for outcome in outcomes))
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError:
            file.seek(whole_bytes)
            file.truncate()
            raise

    def clear(self) -> None:
        """The database has everything: remove the file."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Let go of the file and leave it, if there is one, to the next worker."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _create(self) -> FileIO:
        self._directory.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what a full disk didn't take must not be tried again by `close`.
        self._path = self._directory / f"{uuid.uuid4().hex}.jsonl"
        self._file = FileIO(self._path, "ab")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        descriptor = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return self._file


class Leftover:
    """A file that a dead worker left, locked by us until its outcomes are committed."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self.outcomes = list(_read(path, file))

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()


def leftovers(directory: Path) -> list[Leftover]:
    """Files in `directory` that no running worker holds."""
    found = []
    for path in sorted(directory.glob("*.jsonl")):
        if not path.is_file():
            continue
        file = open(path, "rb")  # noqa: SIM115  # the lock lives as long as the file is open
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        found.append(Leftover(path, file))
    return found


def _read(path: Path, file: IO[bytes]) -> list[Outcome]:
    outcomes = []
    for number, line in enumerate(file, 1):
        try:
            outcomes.append(_line.validate_json(line))
        except ValidationError:
            # Only the last line of a killed worker can be torn, and nobody relied on it: it wasn't synced.
            log.warning("%s: line %d is not a whole outcome, skipped", path, number)
    return outcomes
