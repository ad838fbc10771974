"""API keys: made once, kept as hashes, rotated with an overlap, revoked for good."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ledger import Ledger
from ledger.credentials import DEFAULT_SCOPES, ApiKey, NewKey, Scope, key_id_of, token_digest
from ledger.keys import UnknownKey


def usable(ledger: Ledger) -> dict[str, ApiKey]:
    return {key.id: key for key in ledger.keys.list(usable=True)}


def test_a_key_is_recognised_by_its_token_and_by_no_other(ledger: Ledger) -> None:
    issued, other = ledger.keys.create(NewKey("shop", "web")), ledger.keys.create(NewKey("shop"))
    assert re.fullmatch(r"hr_[0-9a-f]{16}_[A-Za-z0-9_-]{43}", issued.token)
    assert key_id_of(issued.token) == issued.key.id
    key = usable(ledger)[issued.key.id]
    assert key == issued.key
    assert (key.tenant, key.name, key.scopes, key.expires_at) == ("shop", "web", DEFAULT_SCOPES, None)
    assert key.matches(issued.token)
    assert not key.matches(other.token)
    assert not key.matches(issued.token[:-1] + ("A" if issued.token[-1] != "A" else "B"))


@pytest.mark.parametrize("text", ["", "hr_", "hr_0123456789abcdef_", "hr_0123456789ABCDEF_" + "a" * 43, "x" * 10_000,
                                  "hr_0123456789abcdef_" + "a" * 44, "hr_0123456789abcdef_" + "é" * 43])  # fmt: skip
def test_what_is_no_token_names_no_key(text: str) -> None:
    assert key_id_of(text) is None


def test_the_ledger_holds_no_token(ledger: Ledger, sql: Any) -> None:
    issued = ledger.keys.create(NewKey("shop"))
    [row] = sql("SELECT * FROM api_keys")
    secret = issued.token.rsplit("_", 1)[-1]
    assert row.digest == token_digest(issued.token)
    assert all(issued.token not in str(value) and secret not in str(value) for value in row)


def test_no_repr_tells_the_token_or_its_hash(ledger: Ledger) -> None:
    issued = ledger.keys.create(NewKey("shop"))
    for shown in (repr(issued), repr(issued.key), str(issued)):
        assert issued.token not in shown
        assert issued.key.digest not in shown


def test_a_key_ends_with_its_time(ledger: Ledger, sql: Any) -> None:
    issued = ledger.keys.create(NewKey("shop", lifetime_s=60))
    assert issued.key.expires_at is not None
    assert abs((issued.key.expires_at - issued.key.created_at).total_seconds() - 60) < 0.1
    assert issued.key.id in usable(ledger)
    sql("UPDATE api_keys SET expires_at = created_at")
    assert usable(ledger) == {}
    assert [key.id for key in ledger.keys.list()] == [issued.key.id]


def test_a_revoked_key_stays_revoked(ledger: Ledger) -> None:
    issued = ledger.keys.create(NewKey("shop"))
    first = ledger.keys.revoke(issued.key.id)
    assert first.revoked_at is not None
    assert usable(ledger) == {}
    assert ledger.keys.revoke(issued.key.id) == first
    with pytest.raises(UnknownKey):
        ledger.keys.rotate(issued.key.id, 60)
    with pytest.raises(UnknownKey):
        ledger.keys.revoke("0" * 16)


def test_a_rotated_key_has_a_successor_and_an_end(ledger: Ledger) -> None:
    asked = NewKey("shop", "web", frozenset({Scope.READ}), requests_per_minute=5, tokens_per_minute=100)
    old = ledger.keys.create(asked)
    new = ledger.keys.rotate(old.key.id, 3600)
    keys = usable(ledger)
    assert set(keys) == {old.key.id, new.key.id}
    assert new.token != old.token
    assert (new.key.tenant, new.key.name, new.key.scopes) == ("shop", "web", frozenset({Scope.READ}))
    assert (new.key.requests_per_minute, new.key.tokens_per_minute, new.key.expires_at) == (5, 100, None)
    ends = keys[old.key.id].expires_at
    assert ends is not None
    assert abs((ends - new.key.created_at).total_seconds() - 3600) < 5


def test_an_overlap_never_lengthens_a_keys_life(ledger: Ledger) -> None:
    old = ledger.keys.create(NewKey("shop", lifetime_s=60))
    new = ledger.keys.rotate(old.key.id, 3600)
    assert usable(ledger)[old.key.id].expires_at == old.key.expires_at
    assert new.key.expires_at is not None
    assert (new.key.expires_at - new.key.created_at).total_seconds() == pytest.approx(60, abs=0.1)


def test_without_an_overlap_the_old_key_ends_at_once(ledger: Ledger) -> None:
    old = ledger.keys.create(NewKey("shop"))
    new = ledger.keys.rotate(old.key.id, 0)
    assert set(usable(ledger)) == {new.key.id}


def test_a_scope_that_this_version_does_not_know_allows_nothing(ledger: Ledger, sql: Any) -> None:
    issued = ledger.keys.create(NewKey("shop"))
    sql('UPDATE api_keys SET scopes = \'["read", "fly"]\'')
    key = usable(ledger)[issued.key.id]
    assert key.scopes == {Scope.READ}
    assert key.allows([Scope.READ])
    assert not key.allows([Scope.READ, Scope.SUBMIT])


def test_admin_allows_everything() -> None:
    from headrace.contract import utc_now

    key = ApiKey("0" * 16, "", "ops", frozenset({Scope.ADMIN}), utc_now())
    assert all(key.allows([scope]) for scope in Scope)
