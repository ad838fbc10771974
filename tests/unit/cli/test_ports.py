"""A taken port is reported and replaced."""

from __future__ import annotations

import socket

from cli.ports import choose, free_port, is_free


def test_a_free_port_is_taken_as_it_is() -> None:
    port, reports = free_port(), list[str]()
    assert choose("the API", port, reports.append) == port
    assert reports == []


def test_a_taken_port_is_replaced_and_reported() -> None:
    reports: list[str] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not is_free(port)
        other = choose("the API", port, reports.append)
    assert other != port
    assert reports == [f"port {port} is taken; the API uses {other}"]


def test_zero_means_any() -> None:
    assert choose("Flower", 0, lambda message: None) > 0
