"""Ports on the loopback interface."""

from __future__ import annotations

import socket
from collections.abc import Callable


def obstacle(port: int, host: str = "127.0.0.1") -> str | None:
    """Why a server can't listen there now, in the system's words; None if it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return None


def is_free(port: int) -> bool:
    """Whether a server could listen there on the loopback now."""
    return obstacle(port) is None


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def choose(name: str, wanted: int, report: Callable[[str], None]) -> int:
    """The wanted port, or a free one if it is taken (which is reported) or 0."""
    if wanted == 0:
        return free_port()
    if is_free(wanted):
        return wanted
    port = free_port()
    report(f"port {wanted} is taken; {name} uses {port}")
    return port
