"""The doctor finds what is wrong, on real parts that are really wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from headrace.contract import JobRequest
from headrace.wire import VISIBILITY_TIMEOUT_S, queue_name, worker_key
from typer.testing import CliRunner

from cli.checks import machine
from cli.checks.broker import check_broker, clock
from cli.checks.finding import Finding, Level, Reporter
from cli.checks.ledger import check_ledger, check_spool
from cli.checks.machine import check_machine
from cli.main import app
from ledger import Ledger, migrate
from ledger.contract import Claim
from settings import Settings, get_settings

AREA = Reporter("test")


@pytest.fixture(autouse=True)
def _fresh_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    get_settings.cache_clear()


def find(findings: Iterable[Finding], text: str) -> Finding:
    """The one finding whose message holds a text."""
    (found,) = [finding for finding in findings if text in finding.message]
    assert (found.advice is None) == (found.level is Level.OK)
    return found


def test_a_good_broker_has_nothing_wrong(broker_url: str) -> None:
    with redis.Redis.from_url(broker_url) as client:
        client.set(worker_key("w@here"), "{}")
    findings = list(check_broker(Settings(redis_url=broker_url)))
    assert {finding.level for finding in findings} == {Level.OK}
    assert find(findings, "noeviction")
    assert find(findings, "append-only file")
    assert find(findings, "consuming: w@here")


def test_an_evicting_broker_fails(broker_url: str) -> None:
    with redis.Redis.from_url(broker_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            assert find(check_broker(Settings(redis_url=broker_url)), "allkeys-lru").level is Level.FAIL
        finally:
            client.config_set("maxmemory-policy", "noeviction")


def test_a_broker_without_persistence_is_a_warning(broker_url: str) -> None:
    with redis.Redis.from_url(broker_url) as client:
        client.config_set("appendonly", "no")
        try:
            assert find(check_broker(Settings(redis_url=broker_url)), "no append-only file").level is Level.WARN
        finally:
            client.config_set("appendonly", "yes")


def test_a_nearly_full_broker_is_a_warning(broker_url: str) -> None:
    with redis.Redis.from_url(broker_url) as client:
        used = int(client.info("memory")["used_memory"])
        client.config_set("maxmemory", int(used * 1.2))
        try:
            assert find(check_broker(Settings(redis_url=broker_url)), "MiB in use").level is Level.WARN
        finally:
            client.config_set("maxmemory", 0)


def test_messages_that_no_worker_reads_are_found(broker_url: str) -> None:
    with redis.Redis.from_url(broker_url) as client:
        client.set(worker_key("w"), '{"model": "served"}')
        for key in (queue_name("served"), queue_name("mistyped"), queue_name("mistyped") + "\x06\x163"):
            client.lpush(key, "{}")
    assert (
        find(check_broker(Settings(redis_url=broker_url)), "2 messages wait for the model 'mistyped'").level
        is Level.WARN
    )
    assert not any("'served'" in finding.message for finding in check_broker(Settings(redis_url=broker_url)))


def test_a_message_that_nobody_renews_is_a_warning(broker_url: str) -> None:
    with redis.Redis.from_url(broker_url) as client:
        client.zadd("unacked_index", {"fresh": time.time()})
        assert find(check_broker(Settings(redis_url=broker_url)), "was renewed").level is Level.OK
        client.zadd("unacked_index", {"stale": time.time() - VISIBILITY_TIMEOUT_S - 5})
        assert find(check_broker(Settings(redis_url=broker_url)), "unrenewed").level is Level.WARN


def test_no_worker_is_a_warning(broker_url: str) -> None:
    assert find(check_broker(Settings(redis_url=broker_url)), "no worker").level is Level.WARN


@pytest.mark.parametrize("url", ["redis://:secret@127.0.0.1:9/0", "nonsense", "redis://:secret/x@127.0.0.1:9/0"])
def test_a_missing_broker_is_one_failure(url: str) -> None:
    (finding,) = check_broker(Settings(redis_url=url))
    assert finding.level is Level.FAIL
    assert "secret" not in finding.message


def test_clocks() -> None:
    assert clock(AREA, "x", 0.01).level is Level.OK
    assert "-7.0 s" in clock(AREA, "x", -7).message
    assert clock(AREA, "x", -7).level is Level.WARN


def test_a_replica_that_only_reads_fails(broker_url: str) -> None:
    with redis.Redis.from_url(broker_url) as client:
        client.replicaof("127.0.0.1", "1")
        try:
            assert find(check_broker(Settings(redis_url=broker_url)), "only reads").level is Level.FAIL
        finally:
            client.replicaof("NO", "ONE")
    assert find(check_broker(Settings(redis_url=broker_url)), "a primary").level is Level.OK


def test_leases_that_nobody_reaps_are_a_warning(database_url: str) -> None:
    migrate.upgrade(database_url)
    ledger = Ledger(database_url)
    job = ledger.submit(JobRequest(model="m", prompt="x")).job
    ledger.claim([Claim(job.id)], "w", -60)
    assert find(check_ledger(Settings(database_url=database_url)), "1 running job has had").level is Level.WARN
    ledger.reap()
    ledger.close()
    assert find(check_ledger(Settings(database_url=database_url)), "run out unnoticed").level is Level.OK


def test_dead_letters_are_told(database_url: str) -> None:
    migrate.upgrade(database_url)
    ledger = Ledger(database_url)
    assert find(check_ledger(Settings(database_url=database_url)), "no dead letter").level is Level.OK
    job = ledger.submit(JobRequest(model="m", prompt="x", max_attempts=1)).job
    ledger.claim([Claim(job.id)], "w", -60)
    ledger.reap()
    ledger.close()
    told = find(check_ledger(Settings(database_url=database_url)), "dead letters: 1;")
    assert told.level is Level.WARN
    assert "headrace dlq list" in str(told.advice)


def test_outcomes_that_wait_in_the_spool_are_a_warning(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    assert find(check_spool(settings), "no outcome waits").level is Level.OK
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "w.jsonl").write_text("{}\n{}\n")
    assert find(check_spool(settings), "2 outcomes wait").level is Level.WARN


def test_a_good_ledger_has_no_failure(database_url: str) -> None:
    migrate.upgrade(database_url)
    findings = list(check_ledger(Settings(database_url=database_url)))
    assert find(findings, "at revision").level is Level.OK
    assert find(findings, "clock of the database").level is Level.OK
    assert find(findings, "0 jobs on record").level is Level.OK
    assert find(findings, "no model is announced").level is Level.WARN


def test_an_empty_database_is_one_failure(database_url: str) -> None:
    (finding,) = check_ledger(Settings(database_url=database_url))
    assert finding.level is Level.FAIL
    assert finding.advice == "run `headrace db upgrade`"


def test_an_unreachable_database_is_one_failure() -> None:
    (finding,) = check_ledger(Settings(database_url="postgresql://u:secret@127.0.0.1:9/x"))
    assert finding.level is Level.FAIL
    assert "secret" not in finding.message


def test_a_missing_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert find(check_machine(Settings()), "no C++ compiler").level is Level.WARN


def test_another_package_called_kernels_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(check_machine(Settings()), "called `kernels`").level is Level.OK
    other = tmp_path / "kernels-0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find(check_machine(Settings()), "'kernels' 0.1").level is Level.FAIL


def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MIN_OPEN_FILES", 10**9)
    assert find(check_machine(Settings()), "may open only").level is Level.WARN


def test_a_taken_port_is_a_warning(broker_url: str) -> None:
    port = urlsplit(broker_url).port or 0
    assert find(check_machine(Settings(flower_port=port)), f"port {port} (Flower)").level is Level.WARN


def test_the_command_fails_with_what_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broker_url: str) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", broker_url)
    monkeypatch.setenv("HEADRACE_DATABASE_URL", f"sqlite:///{tmp_path}/x.sqlite3")
    monkeypatch.setenv("HEADRACE_MODEL__MODEL_PATH", "fake")
    get_settings.cache_clear()
    failed = CliRunner().invoke(app, ["doctor", "--json"])
    assert failed.exit_code == 1
    assert json.loads(failed.output)["ok"] is False
    migrate.upgrade(f"sqlite:///{tmp_path}/x.sqlite3")
    good = CliRunner().invoke(app, ["doctor"])
    assert good.exit_code == 0, good.output
    assert "→" in good.output
    assert "\nok    model    fake: no weights needed\n" in good.output


def test_a_finding_is_printed_before_the_next_check() -> None:
    """With a broker that takes connections and says nothing, what was found before is there."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        doctor = subprocess.Popen(
            [sys.executable, "-m", "cli", "doctor"],
            env={**os.environ, "HEADRACE_REDIS_URL": url, "HEADRACE_MODEL__MODEL_PATH": "fake"},
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert doctor.stdout is not None
        with doctor.stdout as lines, silent.accept()[0]:
            assert next(line for line in lines if " model " in line).endswith("fake: no weights needed\n")
            assert doctor.poll() is None
            doctor.kill()
        doctor.wait()


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("redis://127.0.0.1/0", False),
        ("redis://localhost/0", False),
        ("redis://broker.example:6379/0", True),
        ("rediss://broker.example:6379/0", False),
    ],
)
def test_a_broker_elsewhere_without_tls_is_warned_of(url: str, warned: bool) -> None:
    from cli.checks import broker

    assert [finding.level.value for finding in broker._encryption(url)] == ["warn"] * warned


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("sqlite:////tmp/x.sqlite3", False),
        ("postgresql:///name?host=/run/pg", False),
        ("postgresql://u:p@127.0.0.1/name", False),
        ("postgresql://u:p@db.example/name", True),
        ("postgresql://u:p@db.example/name?sslmode=prefer", True),
        ("postgresql://u:p@db.example/name?sslmode=verify-full", False),
    ],
)
def test_a_database_elsewhere_without_tls_is_warned_of(url: str, warned: bool) -> None:
    from cli.checks import ledger

    assert [finding.level.value for finding in ledger._encryption(url)] == ["warn"] * warned


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    file = tmp_path / "home" / "headrace.sqlite3"
    (finding,) = check_ledger(Settings(database_url=f"sqlite:///{file}"))
    assert (finding.level, finding.advice) == (Level.FAIL, "run `headrace db upgrade`")
    assert not file.parent.exists()


def test_a_missing_cpu_library_is_a_warning_with_the_command_that_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.cpu import library

    for cached in (library.available, library._open):
        cached.cache_clear()
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "headrace_cpu.so")
    warned = find(check_machine(Settings()), "torch serves")
    assert warned.level is Level.WARN
    assert "-m pip install --no-deps -e " in (warned.advice or "")


def test_a_port_of_our_own_service_is_well() -> None:
    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        port = server.server_port
        findings = list(check_machine(Settings(api={"port": port}, flower_port=port)))
        server.shutdown()
        thread.join()
    assert find(findings, f"port {port} (API) has its service").level is Level.OK
    assert find(findings, f"port {port} (Flower) is taken").level is Level.WARN


@pytest.mark.parametrize(
    ("signed", "key", "told"), [(True, None, "aren't signed, and"), (False, "k" * 16, "although"), (True, "k" * 16, "")]
)
def test_a_key_that_the_workers_do_not_share_is_a_warning(
    broker_url: str, signed: bool, key: str | None, told: str
) -> None:
    with redis.Redis.from_url(broker_url) as client:
        client.set(worker_key("w@here"), json.dumps({"model": "m", "signed": signed}))
    findings = check_broker(Settings(redis_url=broker_url, signing_key=key))
    warned = [finding for finding in findings if "signed" in finding.message]
    assert [finding.level for finding in warned] == [Level.WARN] * bool(told)
    assert all(told in finding.message for finding in warned)
