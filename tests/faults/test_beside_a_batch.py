"""Ten thousand jobs of one tenant wait, and somebody asks for single ones: these go on being served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from headrace.contract import Job, JobRequest, JobStatus, Priority, new_job_id

from ledger.clock import db_now
from ledger.contract import Topic
from ledger.database import Database
from ledger.door import new_row, with_seed
from ledger.models import JobRow
from ledger.rows import dispatch, insert_jobs
from tests.conftest import Broker
from tests.faults.stage import Stage
from tests.workers import MODEL, eventually

pytestmark = pytest.mark.slow

BATCH = 10_000
PORTION = 1_000
SINGLE = 8
SLOTS = 8
WINDOW = 32
"""Messages of one class of priority that the broker is given."""


@pytest.fixture
def database(migrated_url: str) -> Iterator[Database]:
    database = Database(migrated_url)
    yield database
    database.close()


@pytest.fixture
def stage(database: Database, migrated_url: str, broker: Broker, tmp_path: Path) -> Iterator[Stage]:
    """One worker, before whom the batch is there."""
    stage = Stage.open(broker, migrated_url, tmp_path, workers=0, MODEL__MAX_NUM_SEQS=SLOTS, QUEUE__WINDOW_JOBS=WINDOW)
    stage.restart_api({"HEADRACE_QUEUE__WINDOW_JOBS": str(WINDOW)})
    request = JobRequest(model=MODEL, prompt="one of many", max_tokens=12, temperature=0.0, tenant="batch")
    for _ in range(BATCH // PORTION):
        database.write(lambda connection: enqueue(connection, request, PORTION))
    stage.start_worker()
    stage.all_ready()
    yield stage
    stage.close()


def enqueue(connection: sa.Connection, request: JobRequest, count: int) -> None:
    """Jobs as the door writes them, many in one transaction."""
    now = connection.execute(sa.select(db_now())).scalar_one()
    ids = [new_job_id() for _ in range(count)]
    insert_jobs(connection, [new_row(job_id, request, with_seed(request), now) for job_id in ids])
    dispatch(connection, Topic.PUBLISH, ids)


def test_single_jobs_are_served(stage: Stage, database: Database) -> None:
    """A few of the batch go first: what the worker holds already, and one window if the class is the same."""
    eventually(lambda: count(database, JobRow.status == JobStatus.SUCCEEDED) > SLOTS, 30, "the batch runs")
    for priority, most_before in ((Priority.HIGH, 3 * SLOTS), (Priority.NORMAL, WINDOW + 3 * SLOTS)):
        before = count(database, JobRow.status == JobStatus.SUCCEEDED)
        jobs: list[Job] = []
        for _ in range(SINGLE):
            [job_id] = stage.submit(priority=priority, tenant="single")
            jobs.append(stage.place.ended(job_id, within_s=30))
        assert {job.status for job in jobs} == {JobStatus.SUCCEEDED}
        went_first = [
            count(database, JobRow.started_at > job.created_at, JobRow.started_at < job.started_at) for job in jobs
        ]
        assert max(went_first) <= most_before, (priority, went_first)
        assert count(database, JobRow.status == JobStatus.SUCCEEDED) > before, "the batch goes on"
    assert count(database, JobRow.status == JobStatus.QUEUED) > BATCH / 2, "and waits"


def count(database: Database, *where: sa.ColumnElement[bool]) -> int:
    """Jobs of the batch."""
    asked = sa.select(sa.func.count()).where(JobRow.tenant == "batch", *where)
    return database.read(lambda connection: connection.execute(asked).scalar_one())
