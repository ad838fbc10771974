"""The database's disk is full: nothing can be written, and nothing is lost."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ledger.migrate import upgrade
from tests.conftest import Broker
from tests.faults.postgres import PostgresServer
from tests.faults.stage import Stage
from tests.workers import eventually

pytestmark = pytest.mark.slow

DISK = "160m"
"""A new cluster of PostgreSQL takes 40 MB, and as much again for what it logs ahead."""


@pytest.fixture
def disk(postgres_home: Path) -> Iterator[Path]:
    """A small file system of its own."""
    directory = postgres_home / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=0755", "none", str(directory)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        directory.rmdir()
        pytest.skip(f"nobody may mount a file system here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "-l", directory], check=True)
    directory.rmdir()


@pytest.fixture
def database(request: pytest.FixtureRequest, disk: Path) -> Iterator[tuple[str, PostgresServer | None]]:
    """A database on that disk, and its server if it has one."""
    if request.config.getoption("--database") == "sqlite":
        yield f"sqlite:///{disk / 'ledger.sqlite3'}", None
        return
    server = PostgresServer(disk / "pg", "-c max_wal_size=32MB")
    server.start()
    yield server.url(), server
    server.kill()


def test_what_runs_ends_and_is_on_record_once_there_is_room(
    broker: Broker, database: tuple[str, PostgresServer | None], disk: Path, tmp_path: Path
) -> None:
    url, server = database
    upgrade(url)
    stage = Stage.open(broker, url, tmp_path, server, workers=1)
    try:
        ids = stage.submit(4, max_tokens=300)
        stage.place.running(*ids)
        filler = disk / "filler"
        fill(filler)
        spool = stage.place.home / "home" / "spool"
        eventually(lambda: sum(len(file.read_bytes().splitlines()) for file in spool.glob("*")) == 4, 20, "all wait")
        with stage.submitting(2, max_tokens=300):
            time.sleep(1.0)
            filler.unlink()
            if server is not None and not server.processes():
                server.start()  # it gives up if it can't log ahead; a supervisor starts it again
        assert {job.attempt for job in stage.assert_clean(within_s=45)} == {1}
    finally:
        stage.close()


def fill(path: Path) -> None:
    """Take all the room that there is, to the last block."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(min(2**20, max(1, shutil.disk_usage(path.parent).free))))
