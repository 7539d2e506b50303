"""The protocol of an encryption of TCP connections; `steepest.runtime.tls.connections` implements it."""

from __future__ import annotations

import socket
from typing import Protocol


class EncryptedSocket(socket.socket):
    """A connected socket that encrypts; its methods are otherwise those of a plain one."""

    #: Bytes that it may have taken from the kernel and not returned, at most.
    withheld = 0

    def advance(self) -> int:
        """Go on with the handshake as far as is possible without blocking.

        Returns:
            0 when it is done, or the selector's event to wait for.

        Raises:
            AuthenticationError: one end does not accept the other.
            ProtocolError: the other end does not encrypt as it should, or closed the connection.
        """
        raise NotImplementedError

    @property
    def binding(self) -> bytes:
        """Bytes that both ends of this very session have, and no other session has."""
        raise NotImplementedError


class Encryption(Protocol):
    """Both ends' settings of an encryption."""

    def accept(self, sock: socket.socket) -> EncryptedSocket:
        """Return an accepted socket that encrypts, without waiting; `advance` does the handshake."""

    def call(self, sock: socket.socket) -> EncryptedSocket:
        """Return a connected socket that encrypts, with the handshake done; waits for its timeout.

        The socket is closed if that fails.

        Raises:
            AuthenticationError: one end does not accept the other.
            ProtocolError: the other end does not encrypt as it should.
            TimeoutError: it did not answer in time.
            ConnectionError: it closed the connection.
        """
