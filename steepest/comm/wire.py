"""The wire: framed streams over TCP between hosts and Unix-domain sockets inside one.

One thread serves all sockets of a process with `selectors`; nothing blocks but `poll`. Payloads leave
from the tensors' memory (`sendmsg`) and arrive in it (`recv_into`). A connection opens with a mutual
proof that both ends know the job's token (HMAC-SHA256 over two fresh nonces); until then not a byte of
it is understood as a frame.

Which sockets, and whether payloads are lent in shared memory, may be narrowed by `ways`:

======== ================================== ==============
ways     inside a host                      between hosts
======== ================================== ==============
"wire"   Unix-domain sockets, shared memory TCP
"shared" Unix-domain sockets, shared memory refused
"unix"   Unix-domain sockets                TCP
"tcp"    TCP                                TCP
======== ================================== ==============

All processes of a job are given the same. The sender decides whether it lends: an end that does not lend still
takes what is lent to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable

import torch

from steepest.comm.channel import Address, Event
from steepest.comm.frame import ROLES, Sink
from steepest.comm.message import Message, Peer
from steepest.comm.shared import AVAILABLE, SHARED_FROM, Lending
from steepest.comm.stream import WireChannel
from steepest.errors import AuthenticationError, ConfigurationError, DeadlineError, PeerLostError, ProtocolError

log = logging.getLogger(__name__)

_GREETING = b"steepest/1\n"
_NONCE = 32
_PROOF = 32
_HELLO_LIMIT = 4096
_REFUSED = struct.pack("<I", 0xFFFFFFFF)  # in place of the answer's size: the proof is wrong
_HANDSHAKE_SECONDS = 10.0
_SOCKET_BUFFER = 4 << 20
_BRISK_SECONDS = 0.0006  # what a short wait is; waking a process that sleeps costs a good part of it
_BRISK_AFTER = 16  # short waits in a row; where processes compute, there is a long one in every step


def _proof(token: bytes, side: bytes, first: bytes, second: bytes, hello: bytes) -> bytes:
    return hmac.new(token, b"\0".join((side, first, second, hello)), hashlib.sha256).digest()


def _pack_peers(peers: tuple[Peer, ...]) -> bytes:
    return b"".join(struct.pack("<Bi", ROLES.index(peer.role), peer.index) for peer in peers)


def _unpack_peers(data: bytes) -> tuple[Peer, ...]:
    try:
        return tuple(Peer(ROLES[role], index) for role, index in struct.iter_unpack("<Bi", data))
    except (struct.error, IndexError):
        raise ProtocolError("handshake names unknown roles") from None


def _names(peers: tuple[Peer, ...]) -> str:
    return " + ".join(str(peer) for peer in peers) or "a peer"


def check_ways(ways: str, *nodes: str) -> None:
    """Checks that processes on these nodes can talk so; over "wire", "tcp" and "ray" they always can.

    Raises:
        ConfigurationError: they cannot.
    """
    if ways in ("shared", "unix") and not _has_unix():
        raise ConfigurationError(
            f'transport="{ways}" needs Unix-domain sockets as Linux has them: give "wire" or "tcp"'
        )
    if ways != "shared":
        return
    if not AVAILABLE:
        raise ConfigurationError('transport="shared" needs shared memory as Linux has it (memfd): give "wire"')
    for other in nodes:
        if other != nodes[0]:
            raise ConfigurationError(
                f'transport="shared", but node {nodes[0][:12]} and node {other[:12]} share no memory: have all '
                'processes on one node, the driver too, or give transport="wire"'
            )


def _has_unix() -> bool:
    """Whether names of sockets may lie in the abstract namespace, where nothing has to be cleaned up."""
    return os.path.exists("/proc/net/unix")


class Handshake:
    """The accepting end's side of the opening; the connecting end does it blocking, in `connect`."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.nonce = secrets.token_bytes(_NONCE)
        self.received = bytearray()


class WireTransport:
    """A `Transport` over sockets.

    Args:
        token: the job's secret, at least 16 bytes.
        peers: the roles of this process, told to the other end.
        node: a name equal for processes that may meet on a Unix-domain socket.
        sink: where arriving payloads go.
        ways: "wire", "shared", "unix" or "tcp"; see above.

    Raises:
        ConfigurationError: this platform does not have what `ways` needs.
    """

    def __init__(self, token: bytes, peers: tuple[Peer, ...], node: str, sink: Sink, ways: str = "wire") -> None:
        if len(token) < 16:
            raise AuthenticationError("the job's token is shorter than 16 bytes")
        check_ways(ways)
        self.ways = ways
        self.lends = ways in ("wire", "shared")
        self.sink = sink
        self.node = node
        self.peers = peers
        self.refused = 0
        self.bytes_sent = 0
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._channels: set[WireChannel] = set()
        self._events: list[Event] = []
        self._gathering: list[WireChannel] = []
        self.lending = Lending()
        self._opening: dict[WireChannel, Handshake] = {}  # oldest first
        self._wake_in, self._wake_out = socket.socketpair()
        for sock in (self._wake_in, self._wake_out):
            sock.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._drain_wake)
        self._short = 0  # waits that were short, one after another
        self._closed = False

    # -- opening -------------------------------------------------------------------------------

    def listen(self, host: str) -> Address:
        """Listens on a free TCP port of that address and on a Unix-domain socket, as far as `ways` has them."""
        listeners, port, unix_name = [], 0, ""
        if self.ways != "shared":
            listeners.append(socket.create_server((host, 0), backlog=128))
            port = listeners[0].getsockname()[1]
        if self.ways != "tcp" and _has_unix():
            unix_name = f"\0steepest-{os.getpid()}-{secrets.token_hex(8)}"
            listeners.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listeners[-1].bind(unix_name)
            listeners[-1].listen(128)
        for sock in listeners:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, self._accepter(sock))
        self._listeners += listeners
        return Address(self.node, host, port, unix_name, self.peers)

    def connect(self, address: Address, timeout: float = 10.0) -> WireChannel:
        """Connects to a listening process, over a Unix-domain socket when it is on the same node.

        Raises:
            PeerLostError: nobody listens there, or not for long.
            AuthenticationError: the two ends do not know the same token.
            ProtocolError: it is not a steepest process of this version.
            DeadlineError: no answer within `timeout` seconds.
            ConfigurationError: it is on another node, which `ways` excludes.
        """
        check_ways(self.ways, self.node, address.node)
        where = f"{_names(address.peers)} at {address.host}" + (f":{address.port}" if address.port else "")
        local = bool(address.unix) and address.node == self.node and self.ways != "tcp"
        sock = socket.socket(socket.AF_UNIX if local else socket.AF_INET, socket.SOCK_STREAM)
        try:
            deadline = time.monotonic() + timeout
            sock.settimeout(timeout)
            sock.connect(address.unix if local else (address.host, address.port))
            peers = self._prove(sock, deadline)
        except TimeoutError:
            sock.close()
            raise DeadlineError(f"{where} did not answer the handshake within {timeout:g} s") from None
        except OSError as error:
            sock.close()
            raise PeerLostError(f"cannot connect to {where}: {error}") from error
        except ProtocolError:
            sock.close()
            raise
        return self._adopt(sock, where, peers)

    def _prove(self, sock: socket.socket, deadline: float) -> tuple[Peer, ...]:
        theirs = _receive_exactly(sock, len(_GREETING) + _NONCE, deadline)
        if not theirs.startswith(_GREETING):
            raise ProtocolError("the other end is not a steepest process of this version")
        first, second = theirs[len(_GREETING) :], secrets.token_bytes(_NONCE)
        hello = _pack_peers(self.peers)
        proof = _proof(self._token, b"connect", first, second, hello)
        sock.sendall(_GREETING + second + struct.pack("<I", len(hello)) + hello + proof)
        prefix = _receive_exactly(sock, len(_REFUSED), deadline)
        if prefix == _REFUSED:
            raise AuthenticationError("the other end refuses this process: the two have different tokens")
        size = struct.unpack("<I", prefix)[0]
        if size > _HELLO_LIMIT:
            raise ProtocolError("oversized handshake")
        answer = _receive_exactly(sock, size, deadline)
        expected = _proof(self._token, b"accept", second, first, answer)
        if not hmac.compare_digest(_receive_exactly(sock, _PROOF, deadline), expected):
            raise AuthenticationError("the other end does not know this job's token")
        return _unpack_peers(answer)

    def _adopt(self, sock: socket.socket, name: str, peers: tuple[Peer, ...]) -> WireChannel:
        channel = WireChannel(self, sock, name, peers)
        _tune(sock)
        sock.setblocking(False)
        self._channels.add(channel)
        self._selector.register(sock, selectors.EVENT_READ, channel)
        return channel

    def _accepter(self, listener: socket.socket) -> Callable[[], None]:
        def accept() -> None:
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # out of descriptors, most likely: who has proven nothing makes room
                log.debug("cannot accept a connection: %s", error)
                if self._opening:
                    self.refuse(next(iter(self._opening)), "its descriptor is needed")
                return
            channel = self._adopt(sock, "an unproven peer", ())
            handshake = channel.handshake = Handshake(time.monotonic() + _HANDSHAKE_SECONDS)
            self._opening[channel] = handshake
            try:
                sock.send(_GREETING + handshake.nonce)
            except OSError as error:
                self.refuse(channel, f"handshake: {error}")

        return accept

    def _continue_handshake(self, channel: WireChannel, handshake: Handshake) -> None:
        fixed = len(_GREETING) + _NONCE + 4
        data = handshake.received
        wanted = fixed
        if len(data) >= fixed:
            wanted = fixed + struct.unpack_from("<I", data, fixed - 4)[0] + _PROOF
        if wanted > _HELLO_LIMIT:
            raise ProtocolError("oversized handshake")
        part = channel._socket.recv(wanted - len(data))
        if not part:
            raise ProtocolError("connection closed during the handshake")
        data += part
        if not _GREETING.startswith(data[: len(_GREETING)]):
            raise ProtocolError("the other end is not a steepest process of this version")
        if len(data) < fixed or len(data) < fixed + struct.unpack_from("<I", data, fixed - 4)[0] + _PROOF:
            return
        second, hello = bytes(data[len(_GREETING) : fixed - 4]), bytes(data[fixed:-_PROOF])
        expected = _proof(self._token, b"connect", handshake.nonce, second, hello)
        if not hmac.compare_digest(bytes(data[-_PROOF:]), expected):
            channel._socket.send(_REFUSED)
            raise AuthenticationError("a peer that does not know this job's token")
        channel.peers = _unpack_peers(hello)
        channel.name = _names(channel.peers)
        channel.handshake = None
        self._opening.pop(channel, None)
        mine = _pack_peers(self.peers)
        answer = _proof(self._token, b"accept", second, handshake.nonce, mine)
        channel._append(memoryview(struct.pack("<I", len(mine)) + mine + answer))
        self._events.append(Event(channel, None, "opened"))
        channel.flush()

    # -- serving -------------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[Event]:
        """Moves bytes both ways; waits up to `timeout` seconds for the first event."""
        gathering, self._gathering = self._gathering, []
        for channel in gathering:
            if not channel.closed:
                channel.flush()
        if self._events:
            timeout = 0.0
        if self._opening:
            timeout = min(timeout, 1.0)
        for key, mask in self._select(max(timeout, 0.0)):
            channel = key.data
            if not isinstance(channel, WireChannel):
                channel()
                continue
            if mask & selectors.EVENT_WRITE and not channel.closed:
                channel.flush()
            if mask & selectors.EVENT_READ and not channel.closed:
                self._read(channel)
        if self._opening:
            now = time.monotonic()
            for channel, handshake in list(self._opening.items()):
                if handshake.deadline < now:
                    self.refuse(channel, "no proof of the token in time")
        events, self._events = self._events, []
        return events

    def _select(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Waits; after many short waits for small messages at first without sleeping, which would take longer.

        Whoever else wants the processor has it meanwhile.
        """
        if not timeout:
            return self._selector.select(0)
        began = time.perf_counter()
        found: list[tuple[selectors.SelectorKey, int]] = []
        while self._short >= _BRISK_AFTER and not found and time.perf_counter() - began < _BRISK_SECONDS:
            found = self._selector.select(0)
            if not found:
                os.sched_yield()
        if not found:
            found = self._selector.select(timeout)
            self._short = self._short + 1 if time.perf_counter() - began < _BRISK_SECONDS else 0
        return found

    def _read(self, channel: WireChannel) -> None:
        try:
            if channel.handshake is not None:
                self._continue_handshake(channel, channel.handshake)
                return
            messages = channel._reader.read()
            self._events += [Event(channel, message) for message in messages]
            channel.await_bytes(channel._reader.missing)
            if channel._reader.missing or any(
                m.payload is not None and m.payload.numel() >= SHARED_FROM for m in messages
            ):
                self._short = 0
            if channel._reader.failed:
                channel._reader.read()  # raises what follows those messages
        except BlockingIOError:
            return
        except EOFError:
            self.lose(channel, "connection closed")
        except ProtocolError as error:
            self.refuse(channel, str(error))
        except OSError as error:
            if channel.handshake is not None:
                self.refuse(channel, f"handshake: {error}")
            else:
                self.lose(channel, str(error))

    def pump(self) -> None:
        """Sends what can be sent now, without waiting."""
        for channel in [channel for channel in self._channels if channel.pending]:
            channel.flush()

    def in_use(self, memory: torch.Tensor) -> bool:
        """Whether a peer may still be reading this memory where it lies, or some of it has not left yet."""
        return self.lending.in_use(memory) or any(c.holds(memory) for c in self._channels if c.pending)

    def wake(self) -> None:
        """Ends a `poll` in progress; may be called from any thread."""
        with contextlib.suppress(BlockingIOError, OSError):  # already woken, or closed
            self._wake_out.send(b"\0")

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass

    # -- called by channels --------------------------------------------------------------------

    def count(self, message: Message) -> None:
        """Adds a sent message to the counters."""
        if message.payload is not None:
            self.bytes_sent += message.payload.numel()

    def gather(self, channel: WireChannel) -> None:
        """What a channel holds leaves with the next `poll` or `pump`."""
        self._gathering.append(channel)

    def watch(self, channel: WireChannel, writing: bool) -> None:
        """Sets whether the selector also waits for a channel to take bytes."""
        if not channel.closed:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
            self._selector.modify(channel._socket, events, channel)

    def refuse(self, channel: WireChannel, reason: str) -> None:
        """Counts and logs a peer that broke the protocol, and closes its channel."""
        self.refused += 1
        log.warning("refused %s: %s", channel.name, reason)
        self.lose(channel, f"refused: {reason}")

    def lose(self, channel: WireChannel, reason: str) -> None:
        """Closes a channel and reports it."""
        if not channel.closed:
            proven = channel.handshake is None
            self.forget(channel)
            if proven:
                self._events.append(Event(channel, None, reason))

    def forget(self, channel: WireChannel) -> None:
        """Closes a channel without an event."""
        if not channel.closed:
            channel.closed = True
            channel.pending = 0
            channel._queue.clear()
            self._channels.discard(channel)
            self._opening.pop(channel, None)
            self._selector.unregister(channel._socket)
            channel._socket.close()
            channel.release()

    def close(self) -> None:
        """Closes every socket."""
        if self._closed:
            return
        self._closed = True
        for channel in list(self._channels):
            channel.close()
        for sock in self._listeners:
            self._selector.unregister(sock)
            sock.close()
        self.lending.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()


def _tune(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
    else:  # TCP sizes its buffers by itself, better than a fixed number does
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notices a host that lost power
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # macOS lacks the first
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


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
