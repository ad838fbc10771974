"""A wire between clients and a server that loses answers: a TCP proxy on a thread."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Callable


class Proxy(threading.Thread):
    """Forwards bytes to a port of the loopback, and back but for the answers that it was told to lose."""

    def __init__(self, target_port: int) -> None:
        super().__init__(name="proxy", daemon=True)
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._loses: Callable[[bytes], bool] = lambda _request: False
        self._deaf: set[socket.socket] = set()
        """Clients whose last request was forwarded, and whose answer is not to arrive."""
        self._closing = False
        self.lost = 0
        """How many answers."""

    def lose_answers(self, to: Callable[[bytes], bool]) -> None:
        """From now on a request that fits is forwarded, and the connection is reset when its answer comes."""
        self._loses = to

    def close(self) -> None:
        self._closing = True
        self.join(5)

    def run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(0.1):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._listener:
                    self._accept()
                elif sock.fileno() >= 0:  # if not, it was dropped with its peer in this round
                    self._forward(sock, *key.data)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self._target_port), 5)
        except OSError:
            _reset(client)
            return
        self._selector.register(client, selectors.EVENT_READ, (server, True))
        self._selector.register(server, selectors.EVENT_READ, (client, False))

    def _forward(self, source: socket.socket, target: socket.socket, asks: bool) -> None:
        try:
            data = source.recv(65536)
            if not data:
                self._drop(source, target)
            elif not asks and target in self._deaf:
                self.lost += 1
                self._drop(source, target)
            else:
                if asks and self._loses(data):
                    self._deaf.add(source)
                target.sendall(data)
        except OSError:
            self._drop(source, target)

    def _drop(self, *socks: socket.socket) -> None:
        for sock in socks:
            self._deaf.discard(sock)
            with contextlib.suppress(KeyError):
                self._selector.unregister(sock)
            _reset(sock)


def _reset(sock: socket.socket) -> None:
    """Close with RST, as after a power cut of the network between."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
