"""Workers as processes of their own, on the real broker and the real database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.workers import WorkerProcess, Workplace


@pytest.fixture
def workplace(broker_url: str, database_url: str, tmp_path: Path) -> Iterator[Workplace]:
    """A broker, a migrated ledger, and a producer that knows only Celery."""
    place = Workplace.open(broker_url, database_url, tmp_path)
    yield place
    place.close()


@pytest.fixture
def start_worker(workplace: Workplace) -> Callable[..., WorkerProcess]:
    """Start a worker in the workplace; it is killed at the end of the test, if it still runs then."""
    return workplace.start_worker
