"""A commit goes through, and the network dies before the answer: whoever asked can't know what became of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from ledger.migrate import upgrade
from tests.conftest import Broker, new_postgres_database
from tests.faults.postgres import PostgresServer
from tests.faults.proxy import Proxy
from tests.faults.stage import Stage

pytestmark = pytest.mark.slow

COMMIT = b"Q\0\0\0\x0bCOMMIT\0"
"""As the protocol sends it."""
JOBS = 12


@pytest.fixture
def wire(postgres_server: PostgresServer) -> Iterator[Proxy]:
    proxy = Proxy(postgres_server.port)
    proxy.start()
    yield proxy
    proxy.close()


def test_answers_to_commits_are_lost(
    on_postgres: None, broker: Broker, postgres_server: PostgresServer, wire: Proxy, tmp_path: Path
) -> None:
    """Submissions, claims, ends and the relay's notes are all asked again, and none is done twice."""
    direct = new_postgres_database(postgres_server.url())
    upgrade(direct)
    stage = Stage.open(broker, direct.replace(f":{postgres_server.port}/", f":{wire.port}/"), tmp_path)
    try:
        commits = itertools.count()
        wire.lose_answers(lambda request: COMMIT in request and next(commits) % 3 == 0)
        stage.submit(JOBS)
        stage.ended(within_s=60)
        wire.lose_answers(lambda request: False)
        assert wire.lost >= JOBS, "a submission, a claim and an end of each were at stake"
        assert {job.attempt for job in stage.assert_clean(within_s=45)} == {1}
        assert len(stage.stories()) == JOBS, "no submission was written twice"
    finally:
        stage.close()
