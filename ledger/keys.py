"""The API keys of the ledger: issued, listed, rotated, revoked. All moments are the database's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from ledger.clock import db_now
from ledger.credentials import ApiKey, IssuedKey, NewKey, Scope, new_token, token_digest
from ledger.database import Database
from ledger.models import ApiKeyRow


class UnknownKey(LookupError):
    """There is no such key, or none that is still valid."""


class Keys:
    """The ledger's API keys. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, asked: NewKey) -> IssuedKey:
        """Make a key. Its token is returned and not kept: only its hash is."""
        key_id, token = new_token()
        return IssuedKey(self._database.write(lambda c: _create(c, asked, key_id, token)), token)

    def list(self, *, usable: bool = False) -> Sequence[ApiKey]:
        """Every key, newest first; with `usable`, those that are neither revoked nor expired."""
        return self._database.read(lambda c: _list(c, usable))

    def revoke(self, key_id: str) -> ApiKey:
        """End a key now. Raises UnknownKey; one that was revoked before stays as it was."""
        return self._database.write(lambda c: _revoke(c, key_id))

    def rotate(self, key_id: str, overlap_s: float) -> IssuedKey:
        """Make a key that is as the old one, which ends in `overlap_s`, unless it ends before that.

        The new key lives as long as the old one was made for, counted from now. Raises UnknownKey.
        """
        new_id, token = new_token()
        return IssuedKey(self._database.write(lambda c: _rotate(c, key_id, overlap_s, new_id, token)), token)


def _create(connection: Connection, asked: NewKey, key_id: str, token: str) -> ApiKey:
    insert_into = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    made = insert_into(ApiKeyRow).values(
        id=key_id,
        digest=token_digest(token),
        name=asked.name,
        tenant=asked.tenant,
        scopes=sorted(asked.scopes),
        created_at=db_now(),
        expires_at=None if asked.lifetime_s is None else db_now(asked.lifetime_s),
        requests_per_minute=asked.requests_per_minute,
        tokens_per_minute=asked.tokens_per_minute,
    )
    connection.execute(made.on_conflict_do_nothing())
    return _one(connection, key_id)


def _one(connection: Connection, key_id: str) -> ApiKey:
    row = connection.execute(select(*ApiKeyRow.__table__.columns).where(ApiKeyRow.id == key_id)).first()
    if row is None:
        raise UnknownKey(f"there is no API key {key_id!r}")
    return _to_key(row)


def _list(connection: Connection, usable: bool) -> list[ApiKey]:
    statement = select(*ApiKeyRow.__table__.columns).order_by(ApiKeyRow.created_at.desc(), ApiKeyRow.id)
    if usable:
        unexpired = or_(ApiKeyRow.expires_at.is_(None), ApiKeyRow.expires_at > db_now())
        statement = statement.where(ApiKeyRow.revoked_at.is_(None), unexpired)
    return [_to_key(row) for row in connection.execute(statement)]


def _revoke(connection: Connection, key_id: str) -> ApiKey:
    ended = update(ApiKeyRow).where(ApiKeyRow.id == key_id, ApiKeyRow.revoked_at.is_(None))
    connection.execute(ended.values(revoked_at=db_now()))
    return _one(connection, key_id)


def _rotate(connection: Connection, key_id: str, overlap_s: float, new_id: str, token: str) -> ApiKey:
    usable = {key.id: key for key in _list(connection, usable=True)}
    if new_id in usable:
        return usable[new_id]  # an earlier run of this transaction was committed, and its answer lost
    if key_id not in usable:
        raise UnknownKey(f"there is no API key {key_id!r} that is still valid")
    old = usable[key_id]
    lifetime_s = None if old.expires_at is None else (old.expires_at - old.created_at).total_seconds()
    asked = NewKey(old.tenant, old.name, old.scopes, lifetime_s, old.requests_per_minute, old.tokens_per_minute)
    sooner = or_(ApiKeyRow.expires_at.is_(None), ApiKeyRow.expires_at > db_now(overlap_s))
    connection.execute(update(ApiKeyRow).where(ApiKeyRow.id == key_id, sooner).values(expires_at=db_now(overlap_s)))
    return _create(connection, asked, new_id, token)


def _to_key(row: Row[Any]) -> ApiKey:
    known = {scope.value for scope in Scope}
    return ApiKey(
        id=row.id,
        name=row.name,
        tenant=row.tenant,
        scopes=frozenset(Scope(scope) for scope in row.scopes if scope in known),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        requests_per_minute=row.requests_per_minute,
        tokens_per_minute=row.tokens_per_minute,
        digest=row.digest,
    )
