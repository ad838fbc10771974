"""A workplace whose broker may be harmed, and a stage on which everything may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ledger.migrate import upgrade
from tests.conftest import Broker, new_postgres_database
from tests.faults.postgres import PostgresServer
from tests.faults.stage import Stage
from tests.workers import WorkerProcess, Workplace


@pytest.fixture
def workplace(broker: Broker, database_url: str, tmp_path: Path) -> Iterator[Workplace]:
    """A broker, a migrated ledger, and a producer that knows only Celery."""
    place = Workplace.open(broker.url, database_url, tmp_path)
    yield place
    place.close()


@pytest.fixture
def start_worker(workplace: Workplace) -> Callable[..., WorkerProcess]:
    """Start a worker in the workplace; it is killed at the end of the test, if it still runs then."""
    return workplace.start_worker


@pytest.fixture
def on_postgres(request: pytest.FixtureRequest) -> None:
    """The test is about PostgreSQL alone. To be named before what starts a server."""
    if request.config.getoption("--database") != "postgres":
        pytest.skip("of PostgreSQL: run with --database postgres")


@pytest.fixture(scope="session")
def postgres_server(postgres_home: Path) -> Iterator[PostgresServer]:
    """A PostgreSQL server that may be harmed; it runs when a test begins."""
    server = PostgresServer(postgres_home / "harmed")
    server.start()
    yield server
    server.kill()


class Theatre:
    """Keeps one stage for many tests, for as long as none of them failed on it."""

    def __init__(self, request: pytest.FixtureRequest, directories: pytest.TempPathFactory) -> None:
        self._request = request
        self._directories = directories
        self._stage: Stage | None = None

    def stage(self) -> Stage:
        """Ready, with nobody's jobs on it."""
        if self._stage is None:
            self._stage = self._build()
        stage = self._stage
        stage.replace_the_dead()
        stage.all_ready()
        stage.accepted.clear()
        return stage

    def close(self) -> None:
        if self._stage is not None:
            self._stage.close()
            self._stage.broker.kill()
            self._stage = None

    def _build(self) -> Stage:
        home = self._directories.mktemp("stage")
        (home / "broker").mkdir()
        broker = Broker(self._request.config.getoption("--broker"), home / "broker")
        broker.start()
        postgres = None
        url = f"sqlite:///{home / 'ledger.sqlite3'}"
        if self._request.config.getoption("--database") == "postgres":
            server = self._request.getfixturevalue("postgres_server")
            postgres, url = server, new_postgres_database(server.url())
        upgrade(url)
        return Stage.open(broker, url, home, postgres)


@pytest.fixture(scope="module")
def theatre(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theatre]:
    theatre = Theatre(request, tmp_path_factory)
    yield theatre
    theatre.close()


@pytest.fixture
def stage(theatre: Theatre, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Two workers, an API, a broker and a database; after a failure the next test gets new ones."""
    stage = theatre.stage()
    failed = request.session.testsfailed
    yield stage
    stage.points.clear()
    if request.session.testsfailed > failed:
        theatre.close()
    else:
        stage.replace_the_dead()
