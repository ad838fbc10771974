"""Real TLS in tests: a certificate authority, a Redis server that speaks nothing else, and PostgreSQL behind it."""

from __future__ import annotations

import selectors
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
import trustme

from tests.conftest import free_port

SSL_REQUEST = struct.pack("!ii", 8, 80877103)
"""What a PostgreSQL client asks first if it wants TLS."""


@dataclass(frozen=True)
class Authority:
    """Certificates for 127.0.0.1 and for a client, and the one that has signed them."""

    ca_file: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path

    @classmethod
    def make(cls, directory: Path) -> Authority:
        directory.mkdir()
        ca = trustme.CA()
        made = cls(*(directory / name for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")))
        ca.cert_pem.write_to_path(str(made.ca_file))
        server, client = ca.issue_cert("127.0.0.1", "localhost"), ca.issue_cert("client")
        server.private_key_pem.write_to_path(str(made.server_key))
        server.cert_chain_pems[0].write_to_path(str(made.server_cert))
        client.private_key_pem.write_to_path(str(made.client_key))
        client.cert_chain_pems[0].write_to_path(str(made.client_cert))
        for key in (made.server_key, made.client_key):
            key.chmod(0o600)
        return made


@dataclass
class TlsBroker:
    """A Redis server that listens with TLS only, and asks clients for a certificate."""

    authority: Authority
    directory: Path
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"rediss://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.fail("TLS is tested with redis-server (Debian's package of that name)")
        made = self.authority
        self.process = subprocess.Popen(
            [binary, "--port", "0", "--tls-port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory),
             "--tls-cert-file", str(made.server_cert), "--tls-key-file", str(made.server_key),
             "--tls-ca-cert-file", str(made.ca_file), "--tls-auth-clients", "yes",
             "--save", "", "--maxmemory-policy", "noeviction", "--loglevel", "warning"],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        until_s = time.monotonic() + 10
        while True:
            with suppress(redis.ConnectionError), self.client() as client:
                client.ping()
                return
            assert self.process.poll() is None, "redis-server did not start"
            assert time.monotonic() < until_s
            time.sleep(0.02)

    def client(self) -> redis.Redis:
        made = self.authority
        return redis.Redis.from_url(
            self.url, ssl_ca_certs=made.ca_file, ssl_certfile=made.client_cert, ssl_keyfile=made.client_key
        )

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)


class TlsGate:
    """TLS in front of a PostgreSQL server that was built without: it answers as the server would, then forwards."""

    def __init__(self, authority: Authority, target: Path | tuple[str, int]) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(authority.server_cert, authority.server_key)
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.plain = 0
        """Connections that did not ask for TLS; they get none."""
        self.encrypted = 0
        threading.Thread(target=self._serve, daemon=True, name="tls-gate").start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._handle, args=(connection,), daemon=True, name="tls-gate-one").start()

    def _handle(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            if connection.recv(8, socket.MSG_WAITALL) != SSL_REQUEST:
                self.plain += 1
                return
            connection.sendall(b"S")
            with self._context.wrap_socket(connection, server_side=True) as client, self._connect() as server:
                self.encrypted += 1
                _forward(client, server)

    def _connect(self) -> socket.socket:
        if isinstance(self._target, tuple):
            return socket.create_connection(self._target)
        server = socket.socket(socket.AF_UNIX)
        server.connect(str(self._target))
        return server


def _forward(client: ssl.SSLSocket, server: socket.socket) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ, server)
        selector.register(server, selectors.EVENT_READ, client)
        while True:
            for ready, _ in selector.select():
                source: socket.socket = ready.fileobj  # type: ignore[assignment]
                data = source.recv(65536)
                while isinstance(source, ssl.SSLSocket) and source.pending():
                    data += source.recv(65536)
                if not data:
                    return
                ready.data.sendall(data)
