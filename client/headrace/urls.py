"""URLs of brokers and databases, which hold passwords: one place that reads them, and one that shows them.

Drivers and Celery hide a password in the place that is meant for it, between the user and the host, and nowhere else.
So `canonical` brings it there, and refuses what two readers would take apart in two ways.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, quote, unquote_plus, urlencode, urlsplit

MASK = "***"
_SECRET = re.compile(r"pass|pwd|secret|token|key|auth", re.IGNORECASE)
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_HOST = r"(\[[0-9a-z:.%_-]*\]|[^:\[\],]*)(:[0-9]{0,5})?"
_HOSTS = re.compile(f"{_HOST}(,{_HOST})*", re.IGNORECASE)


class BadUrl(ValueError):
    """A URL that can't be read in one way only. The message holds nothing of it."""


def masked(url: str) -> str:
    """The URL as it may be shown: without passwords, and without all that may be part of one."""
    found = _URL.fullmatch(url)
    if found is None:
        return MASK if "@" in url or _SECRET.search(url) else url
    scheme, authority, rest = found.group("scheme", "authority", "rest")
    before, at, hosts = authority.rpartition("@")
    if not _HOSTS.fullmatch(hosts) or ("@" in rest and not _is_file(scheme)):
        return f"{scheme}://{MASK}"
    user, colon, _ = before.partition(":")
    if "@" in before:
        before = MASK
    elif colon:
        before = f"{user}:{MASK}"
    return f"{scheme}://{before}{at}{hosts}{_masked_query(rest)}"


def canonical(url: str) -> str:
    """The same URL with its password between user and host. Raises BadUrl.

    A file's URL stays as it is.
    """
    found = _URL.fullmatch(url)
    if found is None:
        raise BadUrl("the URL has no scheme: it begins like redis:// or postgresql://")
    scheme, authority, rest = found.group("scheme", "authority", "rest")
    if _is_file(scheme):
        return url
    before, _, hosts = authority.rpartition("@")
    if "@" in before or "@" in rest or "#" in rest or not _HOSTS.fullmatch(hosts) or not url.isprintable():
        raise BadUrl("the URL can't be read: write special characters of its password as %40 (@), %2F (/), %3A (:), "
                     "%3F (?), %23 (#), and its port as a number")  # fmt: skip
    try:
        parts = urlsplit(url)
    except ValueError:
        raise BadUrl("the URL can't be read: write special characters of its password as %XX") from None
    params = parse_qsl(parts.query, keep_blank_values=True)
    passwords = [value for name, value in params if name == "password"]
    if not passwords:
        return url
    if len(passwords) > 1 or ":" in before:
        raise BadUrl("the URL has more than one password")
    users = [value for name, value in params if name in ("user", "username")]
    user = before or quote("".join(users[-1:]), safe="")
    kept = [(name, value) for name, value in params if name not in ("password", "user", "username")]
    query = f"?{urlencode(kept)}" if kept else ""
    return f"{scheme}://{user}:{quote(passwords[0], safe='')}@{hosts}{parts.path}{query}"


def broker(url: str, tls: Mapping[str, str] | None = None) -> str:
    """The canonical URL of a broker. Raises BadUrl, also for what is no Redis.

    Over TLS (`rediss://`) the server's certificate is checked unless the URL says otherwise: Celery's default is not
    to. `tls` are parameters of redis-py (`ssl_ca_certs`, ...) for a URL that doesn't have them itself.
    """
    kept = canonical(url)
    scheme = kept.partition("://")[0].lower()
    if scheme not in ("redis", "rediss"):
        raise BadUrl("the broker is a Redis or Valkey server: its URL begins with redis:// or rediss://")
    address, _, query = kept.partition("?")
    given = parse_qsl(query, keep_blank_values=True)
    if scheme == "redis":
        if tls or any(name.startswith("ssl_") for name, _ in given):
            raise BadUrl("TLS is asked for, and the broker's URL begins with redis://, not rediss://")
        return kept
    wanted = {"ssl_cert_reqs": "required", **(tls or {}), **dict(given)}
    if wanted["ssl_cert_reqs"] not in ("required", "none"):
        raise BadUrl("ssl_cert_reqs is `required` or `none`")
    return f"{address}?{urlencode(wanted)}"


def _is_file(scheme: str) -> bool:
    return scheme.lower().startswith("sqlite")


def _masked_query(rest: str) -> str:
    """The rest of a URL up to its first secret. What follows may belong to it: a password may hold any sign."""
    path, mark, query = rest.partition("?")
    shown = []
    for part in query.split("&"):
        name, equals, _ = part.partition("=")
        if _SECRET.search(unquote_plus(name)):
            shown.append(f"{name}{equals}{MASK}")
            break
        shown.append(part)
    return path + mark + "&".join(shown)
