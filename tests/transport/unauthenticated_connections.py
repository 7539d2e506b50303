"""Connections by a caller without the token, in every state that such a caller can bring about."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket

from steepest.core.transport.channel import Address
from tests.socket_ends import GREETING, RUDE, client_hello

SAID = [said for said in RUDE.values() if b"M" * 32 not in said]


class UnauthenticatedConnections:
    """Connections to one listener, of which the last few hundred stay open."""

    def __init__(self, address: Address, family: str) -> None:
        self.made = 0
        self._address, self._family = address, family
        self._held: list[socket.socket] = []
        hello = client_hello() if family == "tls" else b""
        self._said = itertools.cycle(
            [*SAID, hello, hello[:20], b"at once", b"byte by byte", b"at length"]
        )
        self._slow: list[socket.socket] = []

    def open_more(self, number: int) -> None:
        for sock in self._slow:
            with contextlib.suppress(OSError):
                sock.send(GREETING[:1])
        for _ in range(number):
            sock = socket.socket(socket.AF_UNIX if self._family == "unix" else socket.AF_INET)
            sock.setblocking(False)
            place = (
                self._address.unix
                if self._family == "unix"
                else (self._address.host, self._address.port)
            )
            error = sock.connect_ex(place)
            if error not in (0, errno.EINPROGRESS):
                assert error == errno.EAGAIN, "as many wait as can"
                sock.close()
                break
            self.made += 1
            self._speak(sock)
        while len(self._held) > 300:
            self._held.pop(0).close()
        del self._slow[:-30]

    def _speak(self, sock: socket.socket) -> None:
        said = next(self._said)
        if said == b"at once":
            sock.close()
            return
        self._held.append(sock)
        with contextlib.suppress(OSError):
            if said == b"byte by byte":
                self._slow.append(sock)
            elif said == b"at length":
                sock.send(bytes(1 << 20))
            else:
                sock.send(said)

    def close(self) -> None:
        for sock in self._held:
            sock.close()
