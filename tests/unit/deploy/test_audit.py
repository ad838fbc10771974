"""The audit fails for what is known of the dependencies, and for nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

FOUND = "Found 2 known vulnerabilities in 1 package\nName Version ID\nx 1.0 PYSEC-1"
PINNED = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
MIRROR = "\n".join(f"{line} Dependency not found on PyPI and could not be audited: {line}" for line in PINNED)
AWAY = "requests.exceptions.ConnectionError: Max retries exceeded with url: /pypi/x/1.0/json"


@pytest.mark.parametrize(
    ("says", "status", "expected", "told"),
    [
        ("No known vulnerabilities found", 0, 0, "No known vulnerabilities"),
        (FOUND, 1, 1, "PYSEC-1"),
        (AWAY, 1, 0, "nothing was audited"),
        ("", 124, 0, "nothing was audited"),
        (MIRROR, 0, 0, "nothing was audited"),
    ],
)
def test_what_it_makes_of_pip_audits_answers(tmp_path: Path, says: str, status: int, expected: int, told: str) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *--version*) exit 0;; esac\ncat <<END\n{says}\nEND\nexit {status}\n')
    python.chmod(0o755)
    done = subprocess.run([ROOT / ".ci/audit", python], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == expected
    assert told in done.stdout + done.stderr


def test_without_pip_audit_it_says_that_nothing_was_audited(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = subprocess.run([ROOT / ".ci/audit", python], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "not installed" in done.stderr


def test_the_integration_run_audits() -> None:
    assert "make audit" in (ROOT / ".ci/run").read_text()
