"""The database's clock and the storage of moments."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import sqlalchemy as sa

from ledger import Ledger
from ledger.clock import UtcTime, db_now
from ledger.database import make_engine

NEAR = timedelta(seconds=5)


@pytest.fixture
def engine(database_url: str) -> Any:
    engine = make_engine(database_url)
    yield engine
    engine.dispose()


def select_now(engine: sa.Engine, offset_s: float = 0.0) -> datetime:
    with engine.begin() as connection:
        return connection.execute(sa.select(db_now(offset_s))).scalar_one()


def test_now_is_aware_utc_and_near_this_machines_clock(engine: sa.Engine) -> None:
    now = select_now(engine)
    assert now.tzinfo is UTC
    assert abs(now - datetime.now(UTC)) < NEAR


@pytest.mark.parametrize("offset_s", [0.25, 7.0, 3600.5, -7.0, 1e-9, 30 * 86400])
def test_an_offset_moves_it(engine: sa.Engine, offset_s: float) -> None:
    moved = select_now(engine, offset_s) - timedelta(seconds=offset_s)
    assert abs(moved - select_now(engine)) < NEAR


def test_two_offsets_of_one_statement_are_two_values(engine: sa.Engine) -> None:
    """A cached statement must not keep the offset of its first run."""
    assert select_now(engine, 10) - select_now(engine, 1000) < timedelta(seconds=-980)


def test_it_moves_on_within_a_transaction(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        first = connection.execute(sa.select(db_now())).scalar_one()
        for _ in range(1000):
            if connection.execute(sa.select(db_now())).scalar_one() > first:
                return
    pytest.fail("the clock stands still within a transaction")


@pytest.mark.parametrize(
    "moment",
    [
        datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC),
        datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC),
        datetime(2026, 1, 31, 12, 0, 0, tzinfo=timezone(timedelta(hours=-8))),
    ],
)
def test_moments_come_back_equal_and_compare_with_the_clock(engine: sa.Engine, moment: datetime) -> None:
    table = sa.Table("moments", sa.MetaData(), sa.Column("at", UtcTime))
    with engine.begin() as connection:
        table.create(connection)
        connection.execute(sa.insert(table).values(at=moment))
        [stored] = connection.execute(sa.select(table.c.at)).scalars()
        past = connection.execute(sa.select(sa.func.count()).where(table.c.at < db_now())).scalar_one()
    assert stored == moment
    assert stored.tzinfo is UTC
    assert past == (moment < datetime.now(UTC))


def test_the_clock_writes_moments_in_the_form_of_the_type(engine: sa.Engine) -> None:
    """On SQLite moments are compared as text, so there must be one form."""
    table = sa.Table("moments", sa.MetaData(), sa.Column("by_clock", UtcTime), sa.Column("by_bind", UtcTime))
    with engine.begin() as connection:
        table.create(connection)
        connection.execute(sa.insert(table).values(by_clock=db_now(0.5)))
        now = connection.execute(sa.select(table.c.by_clock)).scalar_one()
        connection.execute(sa.update(table).values(by_bind=now))
        equal = sa.select(sa.func.count()).select_from(table).where(table.c.by_clock == table.c.by_bind)
        assert connection.execute(equal).scalar_one() == 1


def test_a_naive_moment_is_refused(engine: sa.Engine) -> None:
    with engine.begin() as connection, pytest.raises(sa.exc.StatementError, match="no time zone"):
        connection.execute(sa.select(sa.literal(datetime(2026, 1, 31), UtcTime)))


def test_the_ledger_tells_the_time(ledger: Ledger) -> None:
    assert abs(ledger.now() - datetime.now(UTC)) < NEAR


def test_moments_are_ordered_as_stored(desk: Any, sql: Callable[..., Any]) -> None:
    """A deadline with microseconds and the clock's milliseconds order rightly in SQL."""
    deadline = datetime.now(UTC) + timedelta(microseconds=60_000_001)
    job_id = desk.queued(deadline=deadline)
    assert sql("SELECT id FROM jobs WHERE deadline > created_at AND id = :id", id=job_id)
    assert desk.ledger.get(job_id).deadline == deadline
