"""One `up` for each home, found by the other commands, and only while it lives."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.instance import (
    DEFAULT_API_URL,
    Instance,
    api_url,
    default_model,
    instance_settings,
    running,
    sole,
)
from cli.output import Failure
from settings import get_settings

HERE = Instance(
    api_url="http://127.0.0.1:1234",
    flower_url=None,
    broker_url="redis://127.0.0.1:1/0",
    database_url="sqlite:////tmp/x.sqlite3",
    model="tiny",
    pid=os.getpid(),
    pids={"api": 7},
)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    get_settings.cache_clear()
    return tmp_path


def test_nothing_runs_in_an_empty_home(home: Path) -> None:
    assert running(home) is None
    assert api_url(None) == DEFAULT_API_URL
    assert default_model() == "smollm2-135m"


def test_the_running_instance_is_found(home: Path) -> None:
    with sole(home):
        HERE.write(home)
        assert running(home) == HERE
        assert api_url(None) == HERE.api_url
        assert default_model() == "tiny"
        settings = instance_settings()
        assert (settings.broker_url, settings.ledger_url) == (HERE.broker_url, HERE.database_url)
    assert running(home) is None


def test_only_the_owner_can_read_its_addresses(home: Path) -> None:
    with sole(home):
        HERE.write(home)
        assert stat.S_IMODE((home / "up.json").stat().st_mode) == 0o600


def test_what_is_named_goes_before_the_instance(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sole(home):
        HERE.write(home)
        monkeypatch.setenv("HEADRACE_API_URL", "http://there:1/")
        monkeypatch.setenv("REDIS_URL", "redis://there:2/0")
        monkeypatch.setenv("HEADRACE_MODEL__ALIAS", "mine")
        get_settings.cache_clear()
        assert api_url(None) == "http://there:1"
        assert api_url("http://here:3") == "http://here:3"
        assert api_url("localhost:8000") == "http://localhost:8000"
        assert default_model() == "mine"
        assert instance_settings().broker_url == "redis://there:2/0"
        assert instance_settings().ledger_url == HERE.database_url


def test_a_second_one_is_told_about_the_first(home: Path) -> None:
    with sole(home):
        HERE.write(home)
        with pytest.raises(Failure, match=r"already .*http://127\.0\.0\.1:1234"), sole(home):
            pass
        assert running(home) == HERE


def test_what_a_killed_one_left_behind_does_not_count(home: Path) -> None:
    program = (
        "import pathlib, time; from cli.instance import Instance, sole\n"
        f"home = pathlib.Path({str(home)!r})\n"
        "with sole(home):\n"
        f"    Instance('x', None, '', '', '', 1).write(home)\n"
        "    print('up', flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert running(home) is not None
    process.kill()
    process.wait()
    process.stdout.close()
    assert (home / "up.json").exists()
    assert running(home) is None
    with sole(home):
        assert running(home) is None


def test_looking_for_an_instance_does_not_keep_one_from_starting(home: Path) -> None:
    import fcntl

    home.mkdir(exist_ok=True)
    with (home / "up.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        began_s = time.monotonic()
        with pytest.raises(Failure, match="just starting or stopping"), sole(home):
            pass
        assert time.monotonic() - began_s > 0.2
    with sole(home):
        pass


def test_a_broken_state_file_is_no_instance(home: Path) -> None:
    with sole(home):
        (home / "up.json").write_text('{"api_url": 1')
        assert running(home) is None
