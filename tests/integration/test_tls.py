"""Over TLS to the broker and the database: everything works with the right certificates, nothing with others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import sqlalchemy as sa
from headrace import Client, Producer
from headrace.contract import JobRequest, JobStatus
from headrace.errors import ConnectionFailed

from cli.checks.broker import check_broker
from cli.checks.finding import Level
from ledger import Ledger
from ledger.contract import LedgerUnavailable
from ledger.migrate import upgrade
from settings import Settings
from tests.conftest import new_postgres_database
from tests.integration.api.conftest import ApiServer
from tests.tls import Authority, TlsBroker, TlsGate
from tests.workers import MODEL, WorkerProcess

pytestmark = pytest.mark.slow


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "certificates")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "strange")


@pytest.fixture
def tls_broker(authority: Authority, tmp_path: Path) -> Iterator[TlsBroker]:
    broker = TlsBroker(authority, tmp_path)
    broker.start()
    yield broker
    broker.stop()


def tls_of(ca: Authority, client: Authority) -> dict[str, Any]:
    return {"ca_file": ca.ca_file, "cert_file": client.client_cert, "key_file": client.client_key}


def test_a_job_goes_its_whole_way_over_tls(
    tls_broker: TlsBroker, authority: Authority, migrated_url: str, tmp_path: Path
) -> None:
    """API, relay, worker, event stream, raw producer and doctor, all by one CA file and a client certificate."""
    settings = Settings(
        home=tmp_path / "home",
        redis_url=tls_broker.url,
        redis_tls=tls_of(authority, authority),
        database_url=migrated_url,
        api={"port": 0},
    )
    env = {
        "HEADRACE_HOME": tmp_path / "home",
        "HEADRACE_REDIS_URL": tls_broker.url,
        "HEADRACE_REDIS_TLS__CA_FILE": authority.ca_file,
        "HEADRACE_REDIS_TLS__CERT_FILE": authority.client_cert,
        "HEADRACE_REDIS_TLS__KEY_FILE": authority.client_key,
        "HEADRACE_DATABASE_URL": migrated_url,
        "HEADRACE_MODEL__MODEL_PATH": "fake:step_s=0.005",
        "HEADRACE_MODEL__ALIAS": MODEL,
        "HEADRACE_MODEL__KV_CACHE_BYTES": 64 * 2**20,
        "HEADRACE_WORKER__METRICS_PORT": 0,
    }
    worker = WorkerProcess("w1", {name: str(value) for name, value in env.items()}, tmp_path / "worker.log", ())
    try:
        worker.wait_ready()
        with ApiServer(settings).running() as server, Client(server.url) as client:
            job = client.submit("hello", model=MODEL, max_tokens=8)
            assert "".join(client.stream(job, timeout=20))
            assert client.get(job).status is JobStatus.SUCCEEDED
        with Producer(settings.broker_url) as producer:
            assert producer.run("hello", model=MODEL, max_tokens=3, timeout=20).result
        findings = list(check_broker(settings))
        assert not [finding for finding in findings if finding.level is Level.FAIL]
        assert worker.stop() == 0
        assert "insecure" not in worker.log.lower()
    finally:
        worker.kill()


def test_a_broker_with_a_strangers_certificate_is_none(
    tls_broker: TlsBroker, authority: Authority, stranger: Authority, migrated_url: str, tmp_path: Path
) -> None:
    def findings(**tls: Any) -> list[Level]:
        settings = Settings(home=tmp_path, redis_url=tls_broker.url, redis_tls=tls, database_url=migrated_url)
        return findings_of(settings)

    assert Level.OK in findings(**tls_of(authority, authority))
    assert findings(**tls_of(stranger, authority)) == [Level.FAIL]
    assert findings(**tls_of(authority, stranger)) == [Level.FAIL]
    assert findings(ca_file=authority.ca_file) == [Level.FAIL]  # no certificate of its own
    assert findings() == [Level.FAIL]  # the system's authorities haven't signed it
    assert Level.OK in findings(**{**tls_of(stranger, authority), "verify": False})
    with Producer(tls_broker.url) as producer, pytest.raises(ConnectionFailed):
        producer.submit("hello", model=MODEL)
    wrong_host = tls_broker.url.replace("127.0.0.1", "127.0.0.2")
    assert findings_of(Settings(home=tmp_path, redis_url=wrong_host, redis_tls=tls_of(authority, authority))) == [
        Level.FAIL
    ]


def findings_of(settings: Settings) -> list[Level]:
    return [finding.level for finding in check_broker(settings)]


def test_the_ledger_on_postgresql_over_tls(postgres_url: str, authority: Authority, stranger: Authority) -> None:
    plain = sa.make_url(new_postgres_database(postgres_url))
    gate = TlsGate(authority, target_of(plain))
    base = f"postgresql://{plain.username or 'postgres'}:{plain.password or ''}@127.0.0.1:{gate.port}/{plain.database}"
    checked = f"{base}?sslmode=verify-full&sslrootcert={authority.ca_file}"
    upgrade(checked)
    ledger = Ledger(checked)
    job = ledger.submit(JobRequest(model="m", prompt="x")).job
    assert ledger.get(job.id) == job
    ledger.close()
    assert gate.encrypted > 0
    assert gate.plain == 0
    wrong = Ledger(f"{base}?sslmode=verify-full&sslrootcert={stranger.ca_file}")
    with pytest.raises(LedgerUnavailable, match="certificate"):
        wrong.now()
    wrong.close()
    gate.close()


def target_of(url: sa.URL) -> Path | tuple[str, int]:
    """Where the server without TLS listens."""
    query = parse_qs(urlsplit(url.render_as_string(hide_password=False)).query)
    host = query.get("host", [url.host or ""])[0]
    port = url.port or 5432
    return Path(host) / f".s.PGSQL.{port}" if host.startswith("/") else (host, port)
