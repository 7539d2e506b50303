"""The opening of a connection, in which both ends prove that they know the job's token.

- The acceptor sends the greeting and its nonce.
- The caller sends the greeting, its nonce, the size of its hello, the hello (its own roles, and
  those that it means to reach), and its proof.
- The acceptor sends the size of its answer, the answer (its own roles), and its proof.

A proof is an HMAC-SHA256 of both nonces and of the hello or answer of the same end. In place of the
answer's size the acceptor may say that the proof is wrong, or that it needs the place for another
connection. Until then no other byte of a connection is understood.

Under TLS (`steepest.runtime.tls.connections`) all of this is sent inside the encrypted channel. Before it,
the acceptor says in plain text that it speaks TLS, so that two ends of which only one does so notice at
once; neither end relies on that text for anything else. The key of the proofs is then made of the token
and of the TLS session, so that an attacker in the middle, who has two sessions, can pass on no proof.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from steepest.core.messages.message import ROLES, Peer
from steepest.core.transport.encryption import EncryptedSocket, Encryption
from steepest.core.transport.strangers import (
    MOST_OPENINGS,
    NO_DESCRIPTOR,
    OPENING_SECONDS,
    DescriptorReserve,
    Refusals,
    one_of_a_crowd,
    origin_of,
)
from steepest.errors import AuthenticationError, ProtocolError

ACCEPTED_AT_ONCE = 16  # in one turn, which may come in the middle of a training step
SHAKEN_AT_ONCE = 8  # steps of TLS handshakes in one turn, each of some tenths of a millisecond
MOST_ROLES = 16  # of one process at the other end: each may have some memory of this one
_GREETING = b"steepest/1\n"
_NONCE = 32
_PROOF = 32
_FIXED = len(_GREETING) + _NONCE + 4
_SPEAKS_TLS = b"steepest/1 speaks TLS\n".ljust(len(_GREETING) + _NONCE)
_HELLO_LIMIT = 4096
_REFUSED = struct.pack("<I", 0xFFFFFFFF)
_BUSY = struct.pack("<I", 0xFFFFFFFE)


class BusyError(Exception):
    """The acceptor closed this connection for another one; the caller is to try again."""


def names_of(peers: tuple[Peer, ...]) -> str:
    """Return the roles of one process as text."""
    return " + ".join(str(peer) for peer in peers) or "a peer"


def _proof(token: bytes, side: bytes, first: bytes, second: bytes, content: bytes) -> bytes:
    return hmac.new(token, b"\0".join((side, first, second, content)), hashlib.sha256).digest()


def bound(token: bytes, sock: socket.socket) -> bytes:
    """Return the key of proofs on a connection: the token, or one of this TLS session too."""
    if not isinstance(sock, EncryptedSocket):
        return token
    return hmac.new(token, b"TLS\0" + sock.binding, hashlib.sha256).digest()


def _pack(peers: tuple[Peer, ...]) -> bytes:
    return b"".join(struct.pack("<Bi", ROLES.index(peer.role), peer.index) for peer in peers)


def _unpack(data: bytes) -> tuple[Peer, ...]:
    try:
        return tuple(Peer(ROLES[role], index) for role, index in struct.iter_unpack("<Bi", data))
    except (struct.error, IndexError):
        raise ProtocolError("handshake names unknown roles") from None


def _pack_hello(own: tuple[Peer, ...], meant: tuple[Peer, ...]) -> bytes:
    return struct.pack("<H", len(own)) + _pack(own + meant)


def _unpack_hello(data: bytes) -> tuple[tuple[Peer, ...], tuple[Peer, ...]]:
    if len(data) < 2:
        raise ProtocolError("handshake names no roles")
    count = struct.unpack_from("<H", data)[0]
    if count > MOST_ROLES:
        raise ProtocolError(
            f"handshake of a process with {count} roles, at most {MOST_ROLES} are heard"
        )
    peers = _unpack(data[2:])
    return peers[:count], peers[count:]


# -- the caller's end ------------------------------------------------------------------------------


def secure(sock: socket.socket, tls: Encryption, deadline: float) -> EncryptedSocket:
    """Return a connected socket under TLS, or close it; blocks until the acceptor has answered.

    Args:
        deadline: on the clock of `time.monotonic`, in seconds; TimeoutError after it.

    Raises:
        AuthenticationError: one end does not accept the other's certificate.
        ProtocolError: the other end does not speak TLS.
        BusyError: the acceptor needs the place for another connection.
        OSError: the connection broke.
    """
    with contextlib.ExitStack() as closing:
        closing.callback(sock.close)
        said = _receive_exactly(sock, len(_SPEAKS_TLS), deadline)
        if said.startswith(_GREETING):
            raise ProtocolError(
                "the other end does not speak TLS, and this process speaks nothing else: give the "
                "same tls= to both"
            )
        if said != _SPEAKS_TLS:
            raise ProtocolError("the other end is not a steepest process of this version")
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        closing.pop_all()
    try:
        return tls.call(sock)
    except ConnectionError:
        raise BusyError from None  # it cannot say so before there is a channel to say it in


def prove(
    sock: socket.socket,
    token: bytes,
    own: tuple[Peer, ...],
    meant: tuple[Peer, ...],
    deadline: float,
) -> tuple[Peer, ...]:
    """Prove the token to the acceptor of a connection, and return the roles that it proves to host.

    Blocks until the acceptor has answered.

    Args:
        sock: a connected socket, under TLS if the job's connections are.
        token: the job's secret.
        own: roles of this process.
        meant: roles that the acceptor should host; none for any.
        deadline: on the clock of `time.monotonic`, in seconds.

    Raises:
        AuthenticationError: the two ends do not know the same token.
        ProtocolError: the other end is not a steepest process of this version, or hosts other roles
            than `meant`.
        BusyError: the acceptor needs the place for another connection.
        TimeoutError: no answer by the deadline.
        OSError: the connection broke.
    """
    token = bound(token, sock)
    try:
        greeting = _receive_exactly(sock, len(_GREETING) + _NONCE, deadline)
    except ConnectionError:
        if isinstance(sock, EncryptedSocket):
            raise BusyError from None  # as in `secure`: the acceptor's end of TLS is ready last
        raise
    if greeting == _SPEAKS_TLS:
        raise ProtocolError(
            "the other end speaks TLS alone, and this process does not: give the same tls= to both"
        )
    if not greeting.startswith(_GREETING):
        raise ProtocolError("the other end is not a steepest process of this version")
    first, second = greeting[len(_GREETING) :], secrets.token_bytes(_NONCE)
    hello = _pack_hello(own, meant)
    proof = _proof(token, b"connect", first, second, hello)
    with contextlib.suppress(ConnectionError):  # an end that has closed may have said why
        sock.sendall(_GREETING + second + struct.pack("<I", len(hello)) + hello + proof)
    prefix = _receive_exactly(sock, 4, deadline)
    if prefix == _REFUSED:
        raise AuthenticationError(
            "the other end refuses this process: the two have different tokens"
        )
    if prefix == _BUSY:
        raise BusyError
    size = struct.unpack("<I", prefix)[0]
    if size > _HELLO_LIMIT:
        raise ProtocolError("oversized handshake")
    answer = _receive_exactly(sock, size, deadline)
    expected = _proof(token, b"accept", second, first, answer)
    if not hmac.compare_digest(_receive_exactly(sock, _PROOF, deadline), expected):
        raise AuthenticationError("the other end does not know this job's token")
    roles = _unpack(answer)
    if meant and set(roles) != set(meant):
        raise ProtocolError(
            f"{names_of(meant)} was meant, but {names_of(roles)} answers there: the address is out "
            "of date"
        )
    return roles


def _receive_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("it closed the connection during the handshake")
        data += part
    return bytes(data)


# -- the accepting end -----------------------------------------------------------------------------


@dataclass(eq=False)
class _Opening:
    """A connection that has proven nothing: a socket and at most `_HELLO_LIMIT` bytes."""

    sock: socket.socket
    origin: str
    deadline: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE))
    received: bytearray = field(default_factory=bytearray)


class Openings:
    """The accepting end of a process: listeners, and connections until they have proven the token.

    Strangers can cost only so much: `MOST_OPENINGS` sockets without buffers of this process, each
    for at most `OPENING_SECONDS`, `ACCEPTED_AT_ONCE` new ones in a turn, a line of the log a
    minute. Under TLS each of them may also make OpenSSL keep about 100 kB and do one signature;
    `SHAKEN_AT_ONCE` steps of such handshakes are taken in a turn.

    When descriptors run out, one of these sockets is closed; if there is none, a reserved
    descriptor serves to accept and turn away a caller, so that a listener never stays ready for a
    connection that cannot be accepted.

    When all places are taken, a new connection gets the place of a random one, of the address that
    has most of them. So strangers at other addresses than an honest peer's take no place of its,
    and among strangers at its own address it keeps its place with probability (1 - 1/48)^n when it
    answers before n more of them are accepted. Bytes that have come are read before new connections
    are accepted. A caller that loses its place, or is too slow, is told so and tries again until
    its own deadline (`BusyError`).

    Over Unix-domain sockets, which every user of the host can reach, only this user and root may
    connect.

    Args:
        token: the job's secret.
        peers: the roles of this process.
        selector: of the transport; the data of each registered socket is a function to call when
            the socket is ready.
        adopt: takes over a socket whose other end has proven to host these roles.
        clock: in seconds, monotonic.
        tls: the settings of TLS for connections over TCP; None for plain ones.
    """

    def __init__(
        self,
        token: bytes,
        peers: tuple[Peer, ...],
        selector: selectors.BaseSelector,
        adopt: Callable[[socket.socket, tuple[Peer, ...]], None],
        clock: Callable[[], float] = time.monotonic,
        tls: Encryption | None = None,
    ) -> None:
        self.refusals = Refusals(clock)
        self._tls = tls
        self._shaken = 0  # steps of TLS handshakes in this turn
        self._token = token
        self._peers = peers
        self._selector = selector
        self._adopt = adopt
        self._clock = clock
        self._ready: list[socket.socket] = []  # listeners
        self._open: dict[_Opening, None] = {}  # oldest first
        self._reserve = DescriptorReserve()

    def listen(self, listener: socket.socket) -> None:
        """Accept the connections of a listening socket from now on."""
        listener.setblocking(False)
        self._reserve.fill()
        self._selector.register(
            listener, selectors.EVENT_READ, lambda: self._ready.append(listener)
        )

    def limit(self, timeout: float) -> float:
        """Return the shorter of `timeout` and the seconds until a connection has to be closed."""
        if self._open:
            timeout = min(timeout, next(iter(self._open)).deadline - self._clock())
        return timeout

    def turn(self) -> None:
        """Accept some connections, and close those that have not proven the token in time; called after each wait."""
        self._shaken = 0
        ready, self._ready = self._ready, []
        for listener in ready:
            for _ in range(ACCEPTED_AT_ONCE):
                if not self._accept(listener):
                    break
        while self._open and (oldest := next(iter(self._open))).deadline <= self._clock():
            self._refuse(oldest, "no proof of the token in time", _BUSY)
        self.refusals.log_if_due()

    def close(self) -> None:
        """Close the connections that have not proven the token; the listeners stay open."""
        for opening in list(self._open):
            self._drop(opening)
        self._reserve.free()
        self.refusals.log_if_due(now=True)

    def leave(self) -> None:
        """Close this process' copies of the sockets, which stay open in the one it was forked from."""
        for opening in self._open:
            opening.sock.close()
        self._open.clear()
        self._reserve.free()

    def _accept(self, listener: socket.socket) -> bool:
        """Accept one connection, and return whether there may be more."""
        try:
            sock, address = listener.accept()
        except (BlockingIOError, ConnectionError):
            return False
        except OSError as error:
            return error.errno in NO_DESCRIPTOR and self._turn_away(listener)
        sock.setblocking(False)
        origin, stranger = origin_of(sock, address)
        if stranger:
            sock.close()
            self.refusals.add(origin, "a Unix-domain socket serves the user who owns it")
            return True
        if len(self._open) >= MOST_OPENINGS:
            self._make_room()
        self._greet(sock, origin)
        return True

    def _greet(self, sock: socket.socket, origin: str) -> None:
        opening = _Opening(sock, origin, self._clock() + OPENING_SECONDS)
        try:
            if (tls := self._tls_of(sock)) is None:
                sock.send(_GREETING + opening.nonce)
            else:
                sock.send(_SPEAKS_TLS)
                opening.sock = sock = tls.accept(sock)
            self._selector.register(
                sock,
                selectors.EVENT_READ,
                lambda: self._hear(opening) if tls is None else self._shake(opening),
            )
        except OSError as error:  # the caller has closed it, or the selector can take no more
            sock.close()
            self.refusals.add(origin, f"handshake: {error}")
        else:
            self._open[opening] = None

    def _tls_of(self, sock: socket.socket) -> Encryption | None:
        return None if sock.family == socket.AF_UNIX else self._tls

    def _turn_away(self, listener: socket.socket) -> bool:
        """Free a descriptor, and return whether another connection may be accepted.

        It is the descriptor of a connection that has proven nothing, or else the reserved one, which serves to tell
        the caller to try again.
        """
        if self._open:
            self._make_room()
            return True
        return self._reserve.spend(lambda: self._send_away(listener))

    def _send_away(self, listener: socket.socket) -> None:
        sock, address = listener.accept()
        with sock:
            sock.setblocking(False)
            self.refusals.add(origin_of(sock, address)[0], "this process has no descriptor left")
            plain = self._tls_of(sock) is None  # under TLS the end of the connection says it
            sock.send(_GREETING + bytes(_NONCE) + _BUSY if plain else _SPEAKS_TLS)

    def _make_room(self) -> None:
        victim = one_of_a_crowd({opening: opening.origin for opening in self._open})
        self._refuse(victim, "others want its place", _BUSY)

    def _shake(self, opening: _Opening) -> None:
        """Go on with a TLS handshake; greet the other end when it is done."""
        if opening not in self._open or self._shaken >= SHAKEN_AT_ONCE:
            return  # it was closed a moment ago, or is ready again in the next turn
        self._shaken += 1
        sock = opening.sock
        assert isinstance(sock, EncryptedSocket)
        try:
            if wanted := sock.advance():
                self._selector.modify(sock, wanted, lambda: self._shake(opening))
                return
            sock.send(_GREETING + opening.nonce)
            self._selector.modify(sock, selectors.EVENT_READ, lambda: self._hear(opening))
        except ProtocolError as error:
            self._refuse(opening, str(error))
        except OSError as error:
            self._refuse(opening, f"handshake: {error}")

    def _hear(self, opening: _Opening) -> None:
        if opening not in self._open:
            return  # it was closed a moment ago
        try:
            # Until no byte is there: the selector does not know of those that TLS has decrypted.
            while (proven := self._receive(opening)) is None:
                pass
            self._answer(opening, *proven)
        except BlockingIOError:
            return
        except AuthenticationError as error:
            self._refuse(opening, str(error), _REFUSED)
        except ProtocolError as error:
            self._refuse(opening, str(error))
        except OSError as error:
            self._refuse(opening, f"handshake: {error}")

    def _receive(self, opening: _Opening) -> tuple[bytes, bytes] | None:
        """Return the other end's nonce and hello when they are complete and proven; None until then.

        Raises:
            ProtocolError: it is no steepest process of this version, or has closed the connection.
            AuthenticationError: its proof is wrong.
        """
        data = opening.received
        wanted = _FIXED
        if len(data) >= _FIXED:
            wanted += struct.unpack_from("<I", data, _FIXED - 4)[0] + _PROOF
        if wanted > _HELLO_LIMIT:
            raise ProtocolError("oversized handshake")
        part = opening.sock.recv(wanted - len(data))
        if not part:
            raise ProtocolError("connection closed during the handshake")
        data += part
        if not _GREETING.startswith(data[: len(_GREETING)]):
            raise ProtocolError("the other end is not a steepest process of this version")
        if (
            len(data) < _FIXED
            or len(data) < _FIXED + struct.unpack_from("<I", data, _FIXED - 4)[0] + _PROOF
        ):
            return None
        second, hello = bytes(data[len(_GREETING) : _FIXED - 4]), bytes(data[_FIXED:-_PROOF])
        key = bound(self._token, opening.sock)
        expected = _proof(key, b"connect", opening.nonce, second, hello)
        if not hmac.compare_digest(bytes(data[-_PROOF:]), expected):
            raise AuthenticationError("a peer that does not know this job's token")
        return second, hello

    def _answer(self, opening: _Opening, second: bytes, hello: bytes) -> None:
        """Send this process' roles, and pass the socket to the transport; ProtocolError: other roles were meant."""
        peers, meant = _unpack_hello(hello)
        mine = _pack(self._peers)
        proof = _proof(bound(self._token, opening.sock), b"accept", second, opening.nonce, mine)
        # It fits into the socket's buffer, to which only the greeting was written.
        opening.sock.send(struct.pack("<I", len(mine)) + mine + proof)
        if meant and set(meant) != set(self._peers):
            raise ProtocolError(
                f"{names_of(peers)} means {names_of(meant)}, not {names_of(self._peers)}"
            )
        del self._open[opening]
        self._selector.unregister(opening.sock)
        self._adopt(opening.sock, peers)

    def _refuse(self, opening: _Opening, reason: str, last_word: bytes = b"") -> None:
        self.refusals.add(opening.origin, reason)
        if last_word:
            with contextlib.suppress(OSError):
                opening.sock.send(last_word)
        self._drop(opening)

    def _drop(self, opening: _Opening) -> None:
        if self._open.pop(opening, self) is None:
            self._selector.unregister(opening.sock)
        opening.sock.close()
