"""A wire between two processes that can be cut: a TCP proxy on a thread."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Callable


class Proxy(threading.Thread):
    """Forwards bytes to a port of the loopback until it is told otherwise."""

    def __init__(self, target_port: int) -> None:
        super().__init__(name="proxy", daemon=True)
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._cut_after: Callable[[bytes], bool] | None = None
        self._left = 0
        self._deaf: set[socket.socket] = set()
        """Clients whose last request was forwarded and whose answer is not to arrive."""
        self._reset_all = False
        self._closing = False
        self.cuts = 0
        """How many answers were lost."""

    def lose_answer(self, to: Callable[[bytes], bool], times: int = 1) -> None:
        """Forward the next `times` requests that fit, and reset the connection when the answer comes."""
        self._cut_after, self._left = to, times

    def reset(self) -> None:
        """Reset every connection that there is now."""
        self._reset_all = True
        self._wake.send(b"!")

    def close(self) -> None:
        self._closing = True
        self._wake.send(b"!")
        self.join(5)

    def run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(1.0):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._listener:
                    self._accept()
                elif sock is self._woken:
                    self._woken.recv(64)
                elif sock in self._selector.get_map():
                    self._forward(sock, *key.data)
            if self._reset_all:
                self._reset_all = False
                self._reset_pairs()
        self._reset_pairs()
        for sock in (self._listener, self._wake, self._woken):
            sock.close()
        self._selector.close()

    def _reset_pairs(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None and isinstance(key.fileobj, socket.socket):
                self._drop(key.fileobj, key.data[0])

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self._target_port), 5)
        except OSError:
            _reset(client)
            return
        self._selector.register(client, selectors.EVENT_READ, (server, True))
        self._selector.register(server, selectors.EVENT_READ, (client, False))

    def _forward(self, source: socket.socket, target: socket.socket, request: bool) -> None:
        try:
            data = source.recv(65536)
            if not data or (not request and target in self._deaf):
                self.cuts += target in self._deaf
                self._drop(source, target)
                return
            if request and self._left and self._cut_after is not None and self._cut_after(data):
                self._left -= 1
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
