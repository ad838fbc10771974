"""API keys as values: what one may do, how a token is made, and how it is recognised.

A token is `hr_<id>_<secret>`: the id names the key and may be shown, the secret holds 256 random bits. So the ledger
keeps a plain SHA-256 of the token; a slow hash protects secrets that can be guessed, and this one can't.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

_TOKEN = re.compile(r"hr_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")


class Scope(StrEnum):
    """What a key allows."""

    SUBMIT = "submit"
    """Submitting jobs, and retrying them."""
    READ = "read"
    """Reading and following jobs, listing them, models and queues."""
    CANCEL = "cancel"
    METRICS = "metrics"
    """The door's metrics, which count every tenant's jobs."""
    ADMIN = "admin"
    """Everything, for every tenant."""


DEFAULT_SCOPES = frozenset({Scope.SUBMIT, Scope.READ, Scope.CANCEL})


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key as the ledger knows it: enough to recognise its token, never to make it."""

    id: str
    name: str
    tenant: str
    scopes: frozenset[Scope]
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    requests_per_minute: int | None = None
    """None: what `HEADRACE_API__REQUESTS_PER_MINUTE` says."""
    tokens_per_minute: int | None = None
    digest: str = field(default="", repr=False)

    def matches(self, token: str) -> bool:
        """Whether the token is this key's, in a time that tells nothing of it."""
        return hmac.compare_digest(self.digest, token_digest(token))

    def allows(self, scopes: Iterable[Scope]) -> bool:
        return Scope.ADMIN in self.scopes or self.scopes.issuperset(scopes)


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A key that has just been made. Its token is nowhere else."""

    key: ApiKey
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class NewKey:
    """What a key to be made is for."""

    tenant: str
    name: str = ""
    scopes: frozenset[Scope] = DEFAULT_SCOPES
    lifetime_s: float | None = None
    """None: until it is revoked."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


def new_token() -> tuple[str, str]:
    """A fresh key id, and the token that goes with it."""
    key_id = secrets.token_hex(8)
    return key_id, f"hr_{key_id}_{secrets.token_urlsafe(32)}"


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def key_id_of(token: str) -> str | None:
    """The id in a token; None for what is no token."""
    match = _TOKEN.fullmatch(token)
    return match.group(1) if match else None
