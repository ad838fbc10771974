"""A workplace whose broker may be harmed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Broker
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
