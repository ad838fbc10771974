"""No part of a password is ever shown, whatever signs it has and wherever it stands."""

from __future__ import annotations

import traceback
from urllib.parse import quote, quote_plus, unquote, urlsplit

import pytest
import sqlalchemy as sa
from headrace.urls import BadUrl, broker, canonical, masked
from hypothesis import example, given
from hypothesis import strategies as st

ODD = "@/?#:[]%&=;+ \n\\'\"|^ß℀\0"
PORT = "redis://broker:{}/0"
secrets = st.text(st.sampled_from(ODD) | st.sampled_from("aZ19-._~") | st.characters(codec="utf-8"), max_size=12).map(
    lambda odd: f"Zq9{odd}Qz9"
)
places = st.sampled_from(
    [
        "redis://:{}@broker:6379/0",
        "redis://user:{}@broker:6379/0",
        "rediss://user:{}@[::1]:6379/0",
        "redis://broker:6379/0?password={}",
        "redis://broker:6379/0?db=1&password={}&socket_timeout=5",
        PORT,
        "redis+socket://:{}@/run/redis.sock",
        "postgresql://user:{}@database:5432/name",
        "postgresql://user:{}@one:5432,two:5432/name?sslmode=require",
        "postgresql://database/name?user=u&password={}",
        "postgresql:///name?host=/run/pg&user=u&password={}&sslmode=require",
        "postgresql+psycopg://u@database/name?%70assword={}",
        "postgresql://user@database/name?sslpassword={}",
        "sqlite:////tmp/file?password={}",
        "amqp://user:{}@broker//",
        ":{}@broker",
    ]
)


def shows(text: str) -> bool:
    return "Zq9" in text or "Qz9" in text


def canonical_or_traceback(url: str) -> str:
    try:
        kept = canonical(url)
    except BadUrl as refused:
        return "".join(traceback.format_exception(refused))
    assert canonical(kept) == kept
    return kept


@given(places, secrets)
@example("redis://:{}@broker:6379/0", "Zq9?password=Qz9")
@example("redis://broker/0?password={}", "Zq9&x=Qz9")
@example("redis://:{}@broker/0", "Zq9/x:y@zQz9")
@example(PORT, "Zq9@Qz9")
def test_a_password_is_never_shown(place: str, secret: str) -> None:
    for written in (secret, quote(secret, safe=""), quote_plus(secret)):
        if place == PORT and "@" in written:  # a user, a password and a host: nothing says that it is otherwise
            continue
        url = place.format(written)
        assert not shows(masked(url))
        kept = canonical_or_traceback(url)
        if "&" not in written:  # to every reader another parameter begins there
            assert not shows(masked(kept))


@given(secrets, st.sampled_from(["", "user"]))
def test_a_well_written_url_keeps_its_password_and_has_it_where_drivers_hide_it(secret: str, user: str) -> None:
    written = quote(secret, safe="")
    for url in (f"redis://{user}:{written}@broker:6379/0", f"redis://{user}@broker:6379/0?password={written}&db=2"):
        parts = urlsplit(canonical(url))
        assert (parts.hostname, parts.port, parts.path) == ("broker", 6379, "/0")
        assert parts.username == user
        assert unquote(parts.password or "") == secret
        assert parts.query in ("", "db=2")
    url = canonical(f"postgresql:///name?host=/run/pg&user=u&password={written}")
    parsed = sa.make_url(url)
    assert (parsed.username, parsed.password, parsed.database) == ("u", secret, "name")
    assert parsed.query == {"host": "/run/pg"}


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "redis://user@broker",
        "postgresql://me@one:5432,two:5432/name?sslmode=require",
        "postgresql:///name?host=/run/pg",
        "sqlite:////home/me@work/jobs #1.sqlite3",
        "rediss://[fe80::1%25eth0]:6379/0",
        "unix:///run/redis.sock?db=1",
    ],
)
def test_what_has_no_password_is_shown_and_kept_as_it_is(url: str) -> None:
    assert masked(url) == url
    assert canonical(url) == url


@pytest.mark.parametrize(
    "url", ["broker:6379", "redis://:a@b@broker", "redis://:a/b@broker", "redis://h:99x/0", "redis://u:p@h?password=p"]
)
def test_what_can_be_read_in_two_ways_is_refused(url: str) -> None:
    with pytest.raises(BadUrl):
        canonical(url)


@pytest.mark.parametrize(
    ("url", "tls", "query"),
    [
        ("rediss://broker/0", {}, "ssl_cert_reqs=required"),
        ("rediss://broker/0?ssl_cert_reqs=none", {}, "ssl_cert_reqs=none"),
        (
            "rediss://broker/0",
            {"ssl_ca_certs": "/etc/ca 1.pem"},
            "ssl_cert_reqs=required&ssl_ca_certs=%2Fetc%2Fca+1.pem",
        ),
        (
            "rediss://broker/0?ssl_ca_certs=/a.pem",
            {"ssl_ca_certs": "/b.pem"},
            "ssl_cert_reqs=required&ssl_ca_certs=%2Fa.pem",
        ),
        ("rediss://broker/0?db=1", {"ssl_cert_reqs": "none"}, "ssl_cert_reqs=none&db=1"),
        ("redis://broker/0", {}, ""),
    ],
)
def test_a_broker_over_tls_is_checked_unless_the_url_says_otherwise(url: str, tls: dict[str, str], query: str) -> None:
    """Left to itself, Celery takes any certificate for a rediss:// URL, with a line in its log."""
    kept = broker(url, tls)
    assert kept.partition("?")[2] == query
    assert broker(kept) == kept


@pytest.mark.parametrize(
    ("url", "tls"),
    [
        ("redis://broker/0", {"ssl_ca_certs": "/ca.pem"}),
        ("redis://broker/0?ssl_cert_reqs=required", {}),
        ("rediss://broker/0?ssl_cert_reqs=optional", {}),
        ("http://broker", {}),
    ],
)
def test_tls_that_would_not_be_there_is_refused(url: str, tls: dict[str, str]) -> None:
    with pytest.raises(BadUrl):
        broker(url, tls)
