"""Who asks, and what they may do: every route takes its caller through one of these.

A caller belongs to one tenant and sees that tenant's jobs alone; another's are as if they weren't there. A key with the
scope `admin` sees every tenant, and so does everybody where no keys are asked for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Response, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from headrace.contract import JobRequest
from headrace.errors import Forbidden, Unauthorized

from api.door import Door, TheDoor
from ledger.contract import LedgerUnavailable
from ledger.credentials import ApiKey, Scope

_bearer = HTTPBearer(
    scheme_name="api_key",
    description="A key made by `headrace keys create`. Not asked for where the server runs without keys.",
    auto_error=False,
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request. `key` is None where no keys are asked for."""

    key: ApiKey | None = None

    @property
    def tenant(self) -> str | None:
        """The one tenant whose jobs the caller may see; None: every one's."""
        return None if self.key is None or Scope.ADMIN in self.key.scopes else self.key.tenant

    def listed(self, tenant: str | None) -> str | None:
        """The tenant whose jobs a list has, if `tenant` was asked for. Raises Forbidden for another's."""
        if tenant is not None and self.tenant not in (None, tenant):
            raise _other_tenant(tenant)
        return tenant or self.tenant

    def submitted(self, request: JobRequest) -> JobRequest:
        """The request on behalf of the key's tenant, unless it names one. Raises Forbidden for another's."""
        if self.key is None:
            return request
        if "tenant" not in request.model_fields_set:
            return request.model_copy(update={"tenant": self.key.tenant})
        self.listed(request.tenant)
        return request


async def _caller(
    needed: SecurityScopes,
    request: Request,
    response: Response,
    door: TheDoor,
    given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Caller:
    """The caller, if its key allows what the route is for. Raises Unauthorized, Forbidden and RateLimited."""
    if not door.settings.api.needs_keys:
        response.headers.update(await door.rates.request(None))
        return Caller()
    if given is None or len(request.headers.getlist("authorization")) > 1:
        raise _unauthorized("give one API key, as `Authorization: Bearer hr_...`", "missing_api_key")
    key = await door.keyring.find(given.credentials)
    if key is None:
        raise revoked()
    if not key.allows(Scope(scope) for scope in needed.scopes):
        message = f"this API key lacks the scope {' and '.join(needed.scopes)}"
        raise Forbidden(message, type="permission_error", code="missing_scope", status=403)
    response.headers.update(await door.rates.request(key))
    return Caller(key)


def revoked() -> Unauthorized:
    return _unauthorized("this API key is not valid, or not any more", "invalid_api_key")


def _unauthorized(message: str, code: str) -> Unauthorized:
    return Unauthorized(message, type="authentication_error", code=code, status=401)


def _other_tenant(tenant: str) -> Forbidden:
    message = f"this API key is not tenant {tenant!r}'s"
    return Forbidden(message, type="permission_error", param="tenant", code="other_tenant", status=403)


Submitter = Annotated[Caller, Security(_caller, scopes=[Scope.SUBMIT])]
Reader = Annotated[Caller, Security(_caller, scopes=[Scope.READ])]
Canceller = Annotated[Caller, Security(_caller, scopes=[Scope.CANCEL])]
Scraper = Annotated[Caller, Security(_caller, scopes=[Scope.METRICS])]


async def still_valid(door: Door, caller: Caller) -> bool:
    """Whether the caller may have what it has waited for. A database that is away leaves it as it was."""
    try:
        return caller.key is None or await door.keyring.valid(caller.key)
    except LedgerUnavailable:
        return True


async def while_valid(door: Door, caller: Caller, frames: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """A stream that ends soon after its reader's key has: it is looked at again with every frame."""
    async with aclosing(frames):
        async for frame in frames:
            if not await still_valid(door, caller):
                return
            yield frame
