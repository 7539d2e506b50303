"""The wire: framed streams over TCP between hosts and Unix-domain sockets inside one.

One thread serves all sockets of a process with `selectors`; nothing blocks but `poll`. Payloads
leave from the tensors' memory (`sendmsg`) and arrive in it (`recv_into`). A connection opens with a
mutual proof that both ends know the job's token (`steepest.core.transport.handshake`); until then no
byte of it is understood as a frame, and it is no channel.

`ways` restricts the kinds of sockets, and whether payloads are lent in shared memory:

======== =================================== ==============
ways     inside a host                       between hosts
======== =================================== ==============
"wire"   Unix-domain sockets, shared memory  TCP
"shared" Unix-domain sockets, shared memory  refused
"unix"   Unix-domain sockets                 TCP
"tcp"    TCP                                 TCP
======== =================================== ==============

With `tls`, connections over TCP are encrypted (`steepest.runtime.tls.connections`), and no other is made or
accepted there. Unix-domain sockets, which do not leave the host, are plain.

All processes of a job are given the same `ways` and the same `tls`. The sender decides whether it lends a payload: an
end that does not lend still reads what is lent to it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import selectors
import socket
import time
import weakref
from collections.abc import Callable

from steepest.core.messages.message import Message, Peer
from steepest.core.tensors.memory import Memory
from steepest.core.tensors.shared_memory import AVAILABLE, SHARED_FROM, Lending
from steepest.core.transport.channel import Address, ChannelSink, TransportEvent
from steepest.core.transport.encryption import EncryptedSocket, Encryption
from steepest.core.transport.handshake import BusyError, Openings, names_of, prove, secure
from steepest.core.transport.stream import WireChannel
from steepest.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
)

log = logging.getLogger(__name__)

_SOCKET_BUFFER = 4 << 20
_BACKLOG = 512
_PATIENCE_SECONDS = 0.25
_PAUSE_SECONDS = 0.005  # before a connection is tried again
_BRISK_SECONDS = 0.0006  # a short wait; waking a process that sleeps costs a good part of it
_BRISK_AFTER = 16  # short waits in a row; where processes compute, every step has a long one


def check_ways(ways: str, *nodes: str) -> None:
    """Check that processes on these nodes can talk in these ways.

    Over "wire" and "tcp" they always can.

    Args:
        ways: as of `ParameterServerStrategy.transport`.
        nodes: the node ids of the processes.

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
        raise ConfigurationError(
            'transport="shared" needs shared memory as Linux has it (memfd): give "wire"'
        )
    for other in nodes:
        if other != nodes[0]:
            raise ConfigurationError(
                f'transport="shared", but node {nodes[0][:12]} and node {other[:12]} share no '
                'memory: have all processes on one node, the driver too, or give transport="wire"'
            )


def _has_unix() -> bool:
    """Return whether sockets can have abstract names, which leave nothing behind."""
    return os.path.exists("/proc/net/unix")


class WireTransport:
    """A `Transport` over sockets.

    Args:
        token: the job's secret, at least 16 bytes.
        peers: the roles of this process, told to the other end.
        node: a name equal for processes that may meet on a Unix-domain socket.
        sink: returns the memory for an arriving payload.
        ways: "wire", "shared", "unix" or "tcp"; see above.
        clock: for the deadlines of connections that have proven nothing; in seconds, monotonic.
        encryption: of TCP, such as `steepest.runtime.tls.connections.Tls`; None for plain TCP.

    Raises:
        AuthenticationError: the token is too short.
        ConfigurationError: this platform does not have what `ways` needs.
    """

    def __init__(
        self,
        token: bytes,
        peers: tuple[Peer, ...],
        node: str,
        sink: ChannelSink,
        ways: str = "wire",
        clock: Callable[[], float] = time.monotonic,
        encryption: Encryption | None = None,
    ) -> None:
        if len(token) < 16:
            raise AuthenticationError("the job's token is shorter than 16 bytes")
        check_ways(ways)
        self.ways = ways
        self.lends = ways in ("wire", "shared")
        self.sink = sink
        self.node = node
        self.peers = peers
        self._broke_off = 0  # peers that broke the protocol
        self.bytes_sent = 0  # of payloads, lent ones included
        self._token = token
        self._tls = encryption
        self.listens_at: str | None = ""
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._channels: set[WireChannel] = set()
        self._events: list[TransportEvent] = []
        self._gathering: list[WireChannel] = []
        self.lending = Lending()  # the memory that is lent to other processes
        self._openings = Openings(token, peers, self._selector, self._welcome, clock, self._tls)
        self._wake_in, self._wake_out = socket.socketpair()
        for sock in (self._wake_in, self._wake_out):
            sock.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._drain_wake)
        self._short = 0  # the number of short waits since the last long one
        self._closed = False
        _transports.add(self)

    @property
    def encrypts(self) -> bool:
        """Whether bytes to other hosts are encrypted."""
        return self._tls is not None

    @property
    def refused(self) -> int:
        """The number of refused connections: of strangers, and of peers that broke the protocol."""
        return self._broke_off + self._openings.refusals.count

    # -- opening -------------------------------------------------------------------------------

    def listen(self, host: str) -> Address:
        """Listen on a free TCP port and on a Unix-domain socket, as far as `ways` has them.

        Args:
            host: an IPv4 or IPv6 address of this host.

        Returns:
            The addresses, for other processes to connect to.

        Raises:
            ConfigurationError: the address is none of this host.
        """
        listeners, port, unix_name = [], 0, ""
        self.listens_at = host
        if self.ways != "shared":
            listeners.append(_listen_tcp(host))
            port = listeners[0].getsockname()[1]
        if self.ways != "tcp" and _has_unix():
            unix_name = f"\0steepest-{os.getpid()}-{secrets.token_hex(8)}"
            listeners.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listeners[-1].bind(unix_name)
            listeners[-1].listen(_BACKLOG)
        for sock in listeners:
            self._openings.listen(sock)
        self._listeners += listeners
        return Address(self.node, host, port, unix_name, self.peers)

    def connect(self, address: Address, timeout: float = 10.0) -> WireChannel:
        """Connect to a listening process, over a Unix-domain socket when it is on the same node.

        If that socket cannot be reached (containers of one node with networks of their own), TCP
        takes its place unless `ways` forces the socket, and no payload is lent. Blocks until the
        connection is open.

        Args:
            address: of the process.
            timeout: in seconds.

        Returns:
            The open channel.

        Raises:
            PeerLostError: no process listens there, or it closes the connection.
            AuthenticationError: the two ends do not know the same token, or one does not accept the
                other's certificate.
            ProtocolError: it is not a steepest process of this version, or not the one that the
                address names, or only one of the two speaks TLS.
            DeadlineError: no answer within `timeout` seconds, or this process had no file descriptor
                left for a socket until then.
            ConfigurationError: it is on another node, which `ways` excludes.
        """
        check_ways(self.ways, self.node, address.node)
        host = f"[{address.host}]" if ":" in address.host else address.host
        where = f"{names_of(address.peers)} at {host}" + (
            f":{address.port}" if address.port else ""
        )
        deadline = time.monotonic() + timeout
        late = f"{where} did not answer the handshake within {timeout:g} s"
        while True:
            sock = None
            try:
                _left(deadline)
                sock = self._dial(address, deadline)
                if self._tls is not None and sock.family != socket.AF_UNIX:
                    sock = secure(sock, self._tls, deadline)
                return self._adopt(
                    sock, where, prove(sock, self._token, self.peers, address.peers, deadline)
                )
            except BusyError:
                _close(sock)
                time.sleep(_PAUSE_SECONDS * (1 + secrets.randbelow(4)))
            except TimeoutError:
                _close(sock)
                raise DeadlineError(late) from None
            except OSError as error:
                _close(sock)
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    late = (
                        f"{where} was not connected to within {timeout:g} s: this process has no "
                        "file descriptor left (raise `ulimit -n`, or close what it does not need)"
                    )
                    time.sleep(_PAUSE_SECONDS)  # the other end may be well
                    continue
                raise PeerLostError(f"cannot connect to {where}: {error}") from error
            except ProtocolError:
                _close(sock)
                raise

    def _dial(self, address: Address, deadline: float) -> socket.socket:
        if address.unix and address.node == self.node and self.ways != "tcp":
            try:
                return _dial_unix(address.unix, deadline)
            except ConnectionRefusedError as error:
                if self.ways != "wire":
                    raise ConnectionRefusedError(
                        f"{error}; it has ended, or this process is in another network namespace "
                        f'of the node, where transport="{self.ways}" reaches no process: give '
                        '"wire" or "tcp"'
                    ) from error
        return _dial_tcp(address, deadline)

    def _adopt(self, sock: socket.socket, name: str, peers: tuple[Peer, ...]) -> WireChannel:
        withheld = sock.withheld if isinstance(sock, EncryptedSocket) else 0
        channel = WireChannel(self, sock, name, peers, withheld)
        _tune(sock)
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, channel)
        self._channels.add(channel)
        return channel

    def _welcome(self, sock: socket.socket, peers: tuple[Peer, ...]) -> None:
        self._events.append(
            TransportEvent(self._adopt(sock, names_of(peers), peers), None, "opened")
        )

    # -- serving -------------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[TransportEvent]:
        """Move bytes both ways, and return the events since the last call, oldest first.

        Args:
            timeout: seconds to wait for the first event.
        """
        gathering, self._gathering = self._gathering, []
        for channel in gathering:
            if not channel.closed:
                channel.flush()
        self.lending.confirm()
        if self._events:
            timeout = 0.0
        timeout = self._openings.limit(timeout)
        for key, mask in self._select(max(timeout, 0.0)):
            channel = key.data
            if not isinstance(channel, WireChannel):
                channel()
                continue
            if mask & selectors.EVENT_WRITE and not channel.closed:
                channel.flush()
            if mask & selectors.EVENT_READ and not channel.closed:
                self._read(channel)
        self._openings.turn()
        events, self._events = self._events, []
        return events

    def _select(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for sockets up to `timeout` seconds, and return those that are ready.

        After many short waits, which small messages cause, poll for a while, yielding the processor, before sleeping:
        waking up would take longer.
        """
        if not timeout:
            return self._selector.select(0)
        began = time.perf_counter()
        ready: list[tuple[selectors.SelectorKey, int]] = []
        while (
            self._short >= _BRISK_AFTER
            and not ready
            and time.perf_counter() - began < _BRISK_SECONDS
        ):
            ready = self._selector.select(0)
            if not ready:
                os.sched_yield()
        if not ready:
            ready = self._selector.select(timeout)
            self._short = self._short + 1 if time.perf_counter() - began < _BRISK_SECONDS else 0
        return ready

    def _read(self, channel: WireChannel) -> None:
        """Read the messages of a channel that has bytes; close it if the stream has failed."""
        try:
            messages = channel._reader.read()
            self._events += [TransportEvent(channel, message) for message in messages]
            channel.await_bytes(channel._reader.missing)
            if channel._reader.missing or any(
                m.payload is not None and m.payload.nbytes >= SHARED_FROM for m in messages
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
            self.lose(channel, str(error))

    def pump(self) -> None:
        """Send the queued bytes that sockets take now, without waiting."""
        for channel in [channel for channel in self._channels if channel.pending]:
            channel.flush()

    def in_use(self, memory: Memory) -> bool:
        """Return whether a peer may be reading this memory, or some of it has not left yet."""
        return self.lending.in_use(memory) or any(
            c.holds(memory) for c in self._channels if c.pending
        )

    def wake(self) -> None:
        """End a `poll` in progress; may be called from any thread."""
        with contextlib.suppress(BlockingIOError, OSError):  # already woken, or closed
            self._wake_out.send(b"\0")

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass

    # -- called by channels --------------------------------------------------------------------

    def count(self, message: Message) -> None:
        """Add a sent message to the counters."""
        if message.payload is not None:
            self.bytes_sent += message.payload.nbytes

    def gather(self, channel: WireChannel) -> None:
        """Send a channel's queued bytes with the next `poll` or `pump`."""
        self._gathering.append(channel)

    def watch(self, channel: WireChannel, writing: bool) -> None:
        """Set whether the selector also waits for a channel's socket to take bytes."""
        if not channel.closed:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
            self._selector.modify(channel._socket, events, channel)

    def refuse(self, channel: WireChannel, reason: str) -> None:
        """Count and log a peer that broke the protocol, and close its channel."""
        self._broke_off += 1
        log.warning("refused %s: %s", channel.name, reason)
        self.lose(channel, f"refused: {reason}")

    def lose(self, channel: WireChannel, reason: str) -> None:
        """Close a channel, and report that as an event with this reason."""
        if not channel.closed:
            self.forget(channel)
            self._events.append(TransportEvent(channel, None, reason))

    def forget(self, channel: WireChannel) -> None:
        """Close a channel without an event."""
        if not channel.closed:
            channel.closed = True
            channel.pending = 0
            channel._queue.clear()
            self._channels.discard(channel)
            self._selector.unregister(channel._socket)
            channel._socket.close()
            channel.release()

    def close(self) -> None:
        """Close every socket."""
        if self._closed:
            return
        self._closed = True
        for channel in list(self._channels):
            channel.close()
        self._openings.close()
        for sock in self._listeners:
            self._selector.unregister(sock)
            sock.close()
        self.lending.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def leave(self) -> None:
        """Close this process' copies of all descriptors; call it in a forked child.

        The process that it was forked from uses the sockets: nothing is sent, and nothing is
        unregistered from the kernel's part of the selector, which both processes share.
        """
        self._closed = True
        self._selector.close()
        for channel in self._channels:
            channel.leave()
        self._channels.clear()
        self._openings.leave()
        for sock in (*self._listeners, self._wake_in, self._wake_out):
            sock.close()


_transports: weakref.WeakSet[WireTransport] = weakref.WeakSet()


def _leave_all() -> None:
    """Leave the sockets of this process to the one that it was forked from."""
    for transport in list(_transports):
        transport.leave()


os.register_at_fork(after_in_child=_leave_all)


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


def _listen_tcp(host: str) -> socket.socket:
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.bind(place)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host!r}: {error}; give an IPv4 or IPv6 address of this host"
        ) from error
    return listener


def _dial_unix(name: str, deadline: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        while True:
            sock.settimeout(_left(deadline))
            try:
                sock.connect(name)
            except BlockingIOError:  # the backlog is full; over TCP the kernel tries again
                time.sleep(_PAUSE_SECONDS)
            else:
                return sock
    except OSError:
        sock.close()
        raise


def _dial_tcp(address: Address, deadline: float) -> socket.socket:
    patience = _PATIENCE_SECONDS
    while True:
        left = _left(deadline)
        try:
            return socket.create_connection((address.host, address.port), min(patience, left))
        except TimeoutError:  # with a full backlog a new attempt is sooner than TCP's own
            patience *= 1.5


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _close(sock: socket.socket | None) -> None:
    if sock is not None:
        sock.close()
