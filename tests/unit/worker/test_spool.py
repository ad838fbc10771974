"""Outcomes on disk: what a dead worker left is found whole, and nobody else's is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from headrace.contract import JobResult, JobStatus, Reason, Timings

from ledger.contract import Lease, Outcome
from worker.spool import Spool, leftovers

DONE = Outcome(
    Lease("j1", "w/1", 3, 2),
    JobStatus.SUCCEEDED,
    JobResult(text="héllo\n", token_ids=[1, 2]),
    timings=Timings(attempts=2),
)
FAILED = Outcome(Lease("j2", "w/1", 1, 1), JobStatus.FAILED, None, Reason.TIME_LIMIT, "too long")


def test_what_was_spooled_is_read_back(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    spool.append([DONE])
    spool.append([FAILED])
    assert leftovers(tmp_path / "spool") == []  # its owner lives
    spool.close()
    [left] = leftovers(tmp_path / "spool")
    assert left.outcomes == [DONE, FAILED]
    assert leftovers(tmp_path / "spool") == []  # we have it now
    left.remove()
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_torn_line_is_skipped(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append([DONE])
    spool.close()
    [path] = tmp_path.glob("*.jsonl")
    path.write_bytes(path.read_bytes() + b'{"lease": {"job')
    [left] = leftovers(tmp_path)
    assert left.outcomes == [DONE]
    left.remove()


def test_a_full_disk_takes_whole_outcomes_or_none_and_closing_is_no_second_attempt(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from tests.unit.worker.test_spool import DONE, FAILED
from worker.spool import Spool
spool = Spool(Path(sys.argv[1]))
spool.append([DONE])
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
for _ in range(3):
    try:
        spool.append([FAILED, DONE, FAILED, DONE])
    except OSError as error:
        print(error.strerror)
spool.close()
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "File too large\n" * 3), done.stderr
    [left] = leftovers(tmp_path)
    assert left.outcomes == [DONE]
    left.remove()


def test_a_cleared_spool_leaves_nothing_and_can_be_used_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.clear()
    spool.append([DONE])
    spool.clear()
    assert list(tmp_path.iterdir()) == []
    spool.append([FAILED])
    spool.close()
    [left] = leftovers(tmp_path)
    assert left.outcomes == [FAILED]
    left.remove()


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert leftovers(tmp_path / "none") == []
