"""Connections to PostgreSQL that never wait for long: a stopped server acknowledges packets and answers nothing."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import psycopg
import sqlalchemy as sa
from psycopg.abc import PQGen
from sqlalchemy import event
from sqlalchemy.engine import URL, Engine
from sqlalchemy.exc import InvalidatePoolError

CONNECT_S = 3
STATEMENT_S = 8.0
"""How long the server may work on one statement."""
SILENCE_S = 10.0
"""A server that hasn't answered a statement by then is away, whatever the network says of it."""
IDLE_S = 5.0
"""A connection that was idle for this long is asked whether it still lives, before it is used."""
PING_S = 2.0
"""How long that answer may take."""

RV = TypeVar("RV")


class BoundedConnection(psycopg.Connection[Any]):
    """It is closed once the server has been silent for too long: a late answer would be taken for another's."""

    silence_s: float | None = SILENCE_S

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        patience_s = self.silence_s if timeout is None else timeout
        began_s = time.monotonic()
        try:
            return super().wait(gen, interval, patience_s)
        except psycopg.OperationalError:
            if patience_s is not None and time.monotonic() - began_s >= patience_s:
                self.close()
            raise


def postgresql_engine(url: URL, pool_timeout_s: float, bounded: bool) -> Engine:
    """`bounded` is false for migrations, whose statements may take what they need."""
    engine = sa.create_engine(
        url,
        hide_parameters=True,
        pool_size=8,
        max_overflow=24,
        pool_timeout=pool_timeout_s,
        pool_recycle=1800,
        connect_args={
            "connect_timeout": CONNECT_S,
            "application_name": "headrace",
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 20_000,
        },
    )
    silence_s = SILENCE_S if bounded else None

    @event.listens_for(engine, "do_connect")
    def connect(_dialect: Any, _record: Any, arguments: Any, parameters: Any) -> BoundedConnection:
        connection = BoundedConnection.connect(*arguments, **parameters)
        connection.silence_s = silence_s
        return connection

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        connection.autocommit = True
        connection.execute(f"SET statement_timeout = '{STATEMENT_S:g}s'")
        connection.execute("SET lock_timeout = '5s'")
        connection.autocommit = False

    @event.listens_for(engine, "checkin")
    def note(_connection: Any, record: Any) -> None:
        record.info["idle_since_s"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def ping(connection: Any, record: Any, _proxy: Any) -> None:
        if time.monotonic() - record.info.get("idle_since_s", time.monotonic()) < IDLE_S:
            return
        connection.silence_s = PING_S
        try:
            connection.execute("SELECT 1")
            connection.rollback()
        except psycopg.Error as error:
            raise InvalidatePoolError(f"the connection is dead: {error}") from None
        connection.silence_s = silence_s

    return engine
