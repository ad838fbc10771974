"""The shared fixtures give real, empty parts."""

from __future__ import annotations

import redis
import sqlalchemy as sa


def test_broker_answers_and_is_empty(broker_url: str) -> None:
    with redis.Redis.from_url(broker_url) as client:
        assert client.ping()
        assert client.dbsize() == 0


def test_database_answers(database_url: str) -> None:
    engine = sa.create_engine(database_url)
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT 1")).scalar() == 1
    engine.dispose()
