"""Whose name a request may be for, where no key is asked for."""

from __future__ import annotations

import pytest

from api.hosts import is_local


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8000", "localhost.:80", "up.localhost:8000", "127.0.0.1", "127.1.2.3:8000", "[::1]:8000",
     "192.168.0.7:8000", "[fe80::1]"],
)  # fmt: skip
def test_addresses_and_this_machines_own_name(host: str) -> None:
    assert is_local(host)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example:8000", "notlocalhost",
     "127.0.0.1@evil.example", "", "[::1"],
)  # fmt: skip
def test_what_somebody_can_point_at_this_machine(host: str) -> None:
    assert not is_local(host)
