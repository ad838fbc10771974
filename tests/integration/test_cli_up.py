"""`headrace up` as a user meets it: real processes, real broker, real ledger, the fake model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from tests.integration.up_process import FAKE, ROOT, Up, gone, headrace

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One instance for the tests that don't harm it."""
    instance = Up.start(tmp_path_factory.mktemp("up") / "home", "--adapter", "sql=unread")
    instance.wait_ready()
    yield instance
    instance.stop()


@pytest.fixture
def env(up: Up) -> dict[str, str]:
    """What a shell on the same home has."""
    return {"HEADRACE_HOME": str(up.home)}


def test_another_shell_needs_no_flags(env: dict[str, str]) -> None:
    done = headrace("submit", "hello", "--max-tokens", "8", "--wait", "--json", env=env)
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)
    assert job["status"] == "succeeded"
    assert job["model"] == "fake"
    assert job["result"]["usage"]["completion_tokens"] == 8
    shown = headrace("status", job["id"], env=env)
    assert job["result"]["text"].split()[0] in shown.stdout
    assert "between tokens" in shown.stdout
    listed = headrace("jobs", "--json", env=env)
    assert job["id"] in {item["id"] for item in json.loads(listed.stdout)}


def test_a_job_may_name_an_adapter(env: dict[str, str]) -> None:
    plain, adapted = (
        headrace("submit", "flow", "--raw", "--max-tokens", "20", *named, "--wait", "--json", env=env)
        for named in ((), ("--adapter", "sql"))
    )
    texts = [json.loads(done.stdout)["result"]["text"] for done in (plain, adapted)]
    assert texts[0] != texts[1]
    unknown = headrace("submit", "flow", "--adapter", "law", env=env)
    assert unknown.returncode == 1
    assert "the model has no adapter 'law': it has sql" in " ".join(unknown.stderr.split())
    listed = headrace("models", "list", env=env)
    assert "adapters sql" in listed.stdout


def test_a_stream_ends_with_the_final_text(env: dict[str, str]) -> None:
    streamed = headrace("submit", "flow", "--raw", "--max-tokens", "20", "--seed", "1", "--stream", env=env)
    assert streamed.returncode == 0, streamed.stderr
    waited = headrace("submit", "flow", "--raw", "--max-tokens", "20", "--seed", "1", "--wait", "--json", env=env)
    assert streamed.stdout == json.loads(waited.stdout)["result"]["text"] + "\n"
    assert "20 out" in streamed.stderr


def test_the_first_examples_of_the_client_run_from_top_to_bottom(up: Up) -> None:
    readme = (ROOT / "client" / "README.md").read_text()
    program = "\n".join(re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[:2])
    program = program.replace("http://headrace:8000", up.state()["api_url"]).replace("smollm2-135m", "fake")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "client")}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_what_is_late_is_told_on_a_line_of_its_own(env: dict[str, str]) -> None:
    done = headrace("submit", "x", "--max-tokens", "400", "--ignore-eos", "--stream", "--timeout", "1", env=env)
    assert done.returncode == 1
    assert done.stdout.endswith("\n")
    assert "had not ended after 1 s" in done.stderr


def test_a_prompt_from_standard_input(env: dict[str, str]) -> None:
    done = headrace("submit", "--file", "-", "--max-tokens", "2", "--wait", env=env, input="from a pipe")
    assert done.returncode == 0, done.stderr
    assert "2 out" in done.stdout


def test_a_running_job_is_cancelled_and_retried(env: dict[str, str]) -> None:
    job = headrace("submit", "long", "--max-tokens", "4000", "--ignore-eos", env=env).stdout.strip()
    cancelled = headrace("cancel", job, "--wait", "--json", env=env)
    assert json.loads(cancelled.stdout)[0]["status"] == "cancelled"
    assert headrace("status", job, env=env).returncode == 1
    again = headrace("retry", job, env=env)
    assert again.returncode == 0, again.stderr
    assert "queued" in again.stdout
    assert headrace("cancel", job, "--wait", env=env).returncode == 0


def test_mistakes_are_told_in_words(env: dict[str, str]) -> None:
    unknown = headrace("status", "no-such-job", env=env)
    assert unknown.returncode == 1
    assert "no-such-job" in unknown.stderr
    model = headrace("submit", "x", "--model", "nobody", env=env)
    assert model.returncode == 1
    assert "nobody" in model.stderr
    long = headrace("submit", "x" * 10_000, env=env)
    assert long.returncode == 1
    for done in (unknown, model, long):
        assert "Traceback" not in done.stderr


def test_the_doctor_finds_nothing_to_fail(env: dict[str, str]) -> None:
    done = headrace("doctor", "--json", env={**env, **FAKE})
    report = json.loads(done.stdout)
    assert report["ok"], [finding for finding in report["findings"] if finding["level"] == "fail"]
    assert done.returncode == 0
    messages = [finding["message"] for finding in report["findings"]]
    assert any("visibility timeout 60 s, as here" in message for message in messages)
    assert any(message.startswith("consuming: fake@") for message in messages)
    assert any(message == "models announced: fake" for message in messages)


def test_a_second_one_says_so(up: Up) -> None:
    second = headrace("up", "--home", str(up.home), timeout=20)
    assert second.returncode == 1
    assert "already" in second.stderr
    assert up.state()["api_url"] in second.stderr
    assert up.process.poll() is None


def test_everything_listens_on_the_loopback_only(up: Up) -> None:
    listening = [
        connection.laddr.ip
        for process in [psutil.Process(up.process.pid), *up.children()]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert set(listening) <= {"127.0.0.1", "::1"}


def test_services_write_logs(up: Up) -> None:
    for name in ("broker", "api", "worker", "flower"):
        assert (up.home / "logs" / f"{name}.log").stat().st_size > 0


def test_a_service_that_dies_comes_back(up: Up, env: dict[str, str]) -> None:
    before = up.state()["pids"]["worker"]
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while up.state()["pids"].get("worker") in (before, None):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    done = headrace("submit", "again", "--max-tokens", "2", "--wait", "--timeout", "60", env=env, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "worker ended (SIGKILL)" in up.text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_stops_everything_in_order(tmp_path: Path, number: int) -> None:
    up = Up.start(tmp_path / "home")
    up.wait_ready()
    children = up.children()
    assert len(children) >= 4
    assert up.stop(number) == 0
    assert gone(children)
    assert "running jobs have up to 25 s to finish; a second Ctrl-C doesn't wait" in up.text()
    assert f"{sys.executable} -m cli submit" in up.text()
    stops = [line.rpartition(" ")[2] for line in up.text().splitlines() if "stopping " in line]
    assert stops == ["worker", "api", "flower", "broker"]
    assert not (up.home / "up.json").exists()


def test_running_jobs_finish_when_it_is_stopped(tmp_path: Path) -> None:
    up = Up.start(tmp_path / "home")
    up.wait_ready()
    env = {"HEADRACE_HOME": str(up.home)}
    job = headrace("submit", "drain", "--max-tokens", "150", "--ignore-eos", env=env).stdout.strip()
    deadline = time.monotonic() + 20
    while json.loads(headrace("status", job, "--json", env=env).stdout)["status"] != "running":
        assert time.monotonic() < deadline
    assert up.stop() == 0
    from ledger import Ledger

    ledger = Ledger(f"sqlite:///{up.home / 'headrace.sqlite3'}")
    ended = ledger.get(job)
    ledger.check()
    ledger.close()
    assert ended is not None
    assert ended.status.value == "succeeded"


def test_no_orphan_survives_a_kill(tmp_path: Path) -> None:
    up = Up.start(tmp_path / "home")
    up.wait_ready()
    children = up.children()
    up.process.kill()
    up.process.wait()
    assert gone(children)
    again = Up.start(tmp_path / "home")
    again.wait_ready()
    assert again.stop() == 0


def test_a_given_broker_is_used_and_left_alone(tmp_path: Path, broker_url: str, database_url: str) -> None:
    up = Up.start(tmp_path / "home", "--no-flower", env={"REDIS_URL": broker_url, "DATABASE_URL": database_url})
    state = up.wait_ready()
    assert state["broker_url"] == broker_url
    assert set(state["pids"]) == {"api", "worker"}
    done = headrace("submit", "x", "--max-tokens", "2", "--wait", env={"HEADRACE_HOME": str(up.home)})
    assert done.returncode == 0, done.stderr
    assert up.stop() == 0
    with redis.Redis.from_url(broker_url) as client:
        assert client.ping()


def test_a_missing_broker_is_told_at_once(tmp_path: Path) -> None:
    up = Up.start(tmp_path / "home", env={"REDIS_URL": "redis://127.0.0.1:9/0"})
    assert up.process.wait(60) == 1
    assert "no broker answers at redis://127.0.0.1:9/0" in up.text()


def test_a_taken_port_is_reported_and_replaced(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        up = Up.start(tmp_path / "home", "--no-flower", "--api-port", str(port))
        state = up.wait_ready()
        assert f"port {port} is taken; the API uses" in up.text()
        assert not state["api_url"].endswith(f":{port}")
        assert up.stop() == 0


def test_a_model_that_is_not_there_fails_the_start(tmp_path: Path) -> None:
    up = Up.start(tmp_path / "home", "--model", "/nowhere/model.gguf")
    assert up.process.wait(60) == 1
    assert "/nowhere/model.gguf" in up.text()
    assert "Traceback" not in up.text()


def test_the_demo_runs_and_leaves_nothing(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = headrace("demo", "--max-tokens", "12", env={**FAKE, "TMPDIR": str(scratch), "COLUMNS": "140"}, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 of 16 jobs succeeded" in done.stdout
    assert "stopping worker" in done.stderr
    assert "Ctrl-C" not in done.stderr
    assert "Why is the sky blue?" in done.stdout
    assert done.stdout.count("12 out") == 16
    assert done.stdout.rstrip().endswith(f"{sys.executable} -m cli up")
    assert list(scratch.iterdir()) == []


def test_an_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    env = {**os.environ, **FAKE, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-m", "cli", "demo"], env=env, stderr=subprocess.PIPE)
    eventually = time.monotonic() + 60
    while not list(tmp_path.glob("headrace-demo-*/broker")):
        assert time.monotonic() < eventually
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert gone(children)
    assert list(tmp_path.iterdir()) == []


def test_the_producer_of_the_demo_needs_the_client_only() -> None:
    program = (
        "import sys, runpy; sys.argv = ['demo_producer.py']\n"
        "runpy.run_path('cli/demo_producer.py')\n"
        "ours = {'cli', 'api', 'worker', 'ledger', 'engine', 'kernels', 'settings', 'text'} & set(sys.modules)\n"
        "sys.exit(str(ours) if ours else 0)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "client")}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
