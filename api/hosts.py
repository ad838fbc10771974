"""Which server a request was meant for, where no key tells friend from foe.

A page of some site may have its own name resolved to 127.0.0.1 (DNS rebinding). A browser then counts the door as that
site, and sends it whatever the page asks for. The name is in the request: it isn't this machine's.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from headrace.errors import Forbidden
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import error_response


def is_local(host: str) -> bool:
    """Whether a `Host` header's value is an address or this machine's own name, which nobody can point elsewhere."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class LocalNames:
    """Refuses requests that were sent to another name than this machine's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or is_local(host):
            await self._app(scope, receive, send)
            return
        refusal = Forbidden(
            f"{host[:100]!r} is not this machine; to be reached by that name the server needs HEADRACE_API__AUTH=keys",
            type="permission_error",
            code="unknown_host",
            status=403,
        )
        await error_response(refusal)(scope, receive, send)
