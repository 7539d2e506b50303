"""The hosts of a job find each other: a TCP connection of each to the leader, for as long as it runs.

By it a host gets Ray's address and token, and hears how the job has ended. The leader speaks to
the job's hosts alone: to addresses to which their names resolve. Messages are lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from steepest.errors import ConfigurationError, DeadlineError, PeerLostError, ProtocolError

log = logging.getLogger(__name__)
LONGEST_LINE = 8192  # bytes
BEAT_SECONDS = 5.0  # between the leader's signs of life
SILENCE_SECONDS = 60.0  # without one, after which the leader is given up
RETRY_SECONDS = 1.0
GREETING_SECONDS = 10.0
PARTING_SECONDS = 5.0  # in which the leader waits for the hosts that read how it ended
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface; ConfigurationError names those there are."""
    import fcntl  # of Unix

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", name.encode()[:15])
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            known = ", ".join(each for _, each in socket.if_nameindex())
            raise ConfigurationError(
                f"SM_NETWORK_INTERFACE_NAME={name!r} has no IPv4 address here ({error.strerror}); "
                f"give one of {known}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def addresses_of(host: str) -> set[str]:
    """Return the IPv4 addresses to which the name of a host resolves now; none if it does not."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(each[4][0]) for each in found}


def _line(**message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Lines:
    """A socket as lines of JSON objects; nothing longer than `LONGEST_LINE` is kept."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._rest = b""

    def arrived(self) -> list[dict[str, Any]]:
        """Receive what has come, waiting as long as the socket's timeout; return whole messages."""
        # ConnectionError: the other end has closed; ProtocolError: what came is no message.
        received = self.link.recv(LONGEST_LINE)
        if not received:
            raise ConnectionError("the connection is closed")
        *whole, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            raise ProtocolError(f"a line of over {LONGEST_LINE} bytes")
        return [_decoded(line) for line in whole]


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        raise ProtocolError("a line that is not JSON") from None
    if not isinstance(message, dict):
        raise ProtocolError("a line that is no JSON object")
    return message


@dataclass(frozen=True)
class Welcome:
    """What a host needs to join: the address of Ray's control store, and Ray's token."""

    ray: str
    token: str = field(repr=False)


class Leader:
    """The leader's end: a thread greets hosts, and sends each a sign of life now and then."""

    # address: its own on the job's interface; hosts: names of the others; welcome: what a host is given; resolve:
    # returns a name's addresses.

    def __init__(
        self,
        address: str,
        port: int,
        hosts: tuple[str, ...],
        welcome: Welcome,
        resolve: Callable[[str], set[str]] = addresses_of,
    ) -> None:
        self._hosts, self._welcome, self._resolve = hosts, welcome, resolve
        self._selector = selectors.DefaultSelector()
        self._joined: dict[str, Lines] = {}
        self.failed: dict[str, str] = {}
        self._refused: set[str] = set()
        self._addresses: dict[str, set[str]] = {}
        self._changed = threading.Condition()
        self._wake, self._woken = socket.socketpair()
        self._end: bytes | None = None
        try:
            self._listener = socket.create_server((address, port), backlog=len(hosts) + 8)
        except OSError as error:
            self._wake.close()
            self._woken.close()
            raise ConfigurationError(
                f"cannot listen at {address}:{port}, where the other hosts ask: {error}; give "
                "another --port"
            ) from None
        self.port: int = self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="steepest hosts", daemon=True)
        self._thread.start()

    def missing(self) -> list[str]:
        """Return the hosts that are not connected."""
        with self._changed:
            return [host for host in self._hosts if host not in self._joined]

    def wait(self, seconds: float) -> None:
        """Return when all hosts are connected, one has failed, or `seconds` have passed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.failed or len(self._joined) == len(self._hosts), seconds
            )

    def end(self, status: int, reason: str) -> None:
        """Tell all hosts the exit status and the failure's reason, or "", wait until they have read it, and close."""
        # A second call does nothing.
        if self._end is not None:
            return
        self._end = _line(ended=status, reason=reason[:1024])
        self._wake.send(b"e")
        self._thread.join(2 * PARTING_SECONDS)
        self._wake.close()

    def _run(self) -> None:
        try:
            beat = time.monotonic()
            while self._end is None:
                self._serve(max(0.0, beat + BEAT_SECONDS - time.monotonic()))
                if time.monotonic() >= beat + BEAT_SECONDS:
                    beat = time.monotonic()
                    self._tell_all(_line(beat=True))
            self._tell_all(self._end)
            for lines in list(self._joined.values()):
                with contextlib.suppress(OSError):
                    lines.link.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + PARTING_SECONDS
            while self._joined and (left := deadline - time.monotonic()) > 0:
                self._serve(left)
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()

    def _serve(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._greet()
            elif key.fileobj is self._woken:
                self._woken.recv(1)
            else:
                self._hear(*key.data)

    def _greet(self) -> None:
        """Accept a connection, and give its host the welcome if it is one of the job's."""
        try:
            link, (address, _) = self._listener.accept()
        except OSError:  # it was closed meanwhile
            return
        if not any(self._has(host, address) for host in self._hosts):
            link.close()
            if address not in self._refused:
                self._refused.add(address)
                log.warning("%s is refused: no host of the job has that address (yet)", address)
            return
        link.settimeout(GREETING_SECONDS)
        self._selector.register(link, selectors.EVENT_READ, ("", address, Lines(link)))

    def _has(self, host: str, address: str) -> bool:
        """Return whether an address is a host's; its name is looked up until it resolves."""
        if not self._addresses.get(host):
            self._addresses[host] = self._resolve(host)
        return address in self._addresses[host]

    def _hear(self, host: str, address: str, lines: Lines) -> None:
        try:
            for message in lines.arrived():
                if not host:
                    host = self._enter(message, address, lines)
                elif "failed" in message:
                    self._fail(host, str(message["failed"])[:1024])
        except (OSError, ProtocolError) as error:
            self._selector.unregister(lines.link)
            lines.link.close()
            with self._changed:
                if self._joined.get(host) is lines:
                    del self._joined[host]
                    self._changed.notify_all()
                    if self._end is None:
                        log.warning("%s is gone: %s", host, error)

    def _enter(self, message: dict[str, Any], address: str, lines: Lines) -> str:
        """Give the welcome to a host that has said its name; return that."""
        # ProtocolError: another host's name, or none.
        host = message.get("host")
        if not isinstance(host, str) or host not in self._hosts:
            raise ProtocolError(f"{address} says that it is {host!r}, which is no host of the job")
        if not self._has(host, address):
            raise ProtocolError(f"{address} says that it is {host}, which has another address")
        lines.link.sendall(_line(ray=self._welcome.ray, token=self._welcome.token))
        self._selector.modify(lines.link, selectors.EVENT_READ, (host, address, lines))
        with self._changed:
            self._joined[host] = lines
            self._changed.notify_all()
        log.info("%s (%s) joins", host, address)
        return host

    def _fail(self, host: str, reason: str) -> None:
        with self._changed:
            self.failed[host] = reason
            self._changed.notify_all()

    def _tell_all(self, line: bytes) -> None:
        for lines in list(self._joined.values()):
            with contextlib.suppress(OSError):  # its end is heard by `_hear`
                lines.link.sendall(line)


class Follower:
    """Another host's end of the leader's `link`, with the welcome that it has said."""

    def __init__(self, leader: str, lines: Lines, welcome: Welcome) -> None:
        self.leader, self.welcome = leader, welcome
        self._lines = lines
        self._heard = time.monotonic()

    def poll(self, seconds: float) -> tuple[int, str] | None:
        """Wait `seconds` for word of the leader; return its exit status and reason if it has ended."""
        # PeerLostError: the leader is gone without a word; DeadlineError: it has been silent for a minute.
        self._lines.link.settimeout(seconds)
        try:
            for message in self._lines.arrived():
                self._heard = time.monotonic()
                if isinstance(status := message.get("ended"), int):
                    return status, str(message.get("reason", ""))
        except TimeoutError:
            if time.monotonic() - self._heard > SILENCE_SECONDS:
                raise DeadlineError(
                    f"{self.leader}, which leads, has sent no sign of life for "
                    f"{SILENCE_SECONDS:g} s"
                ) from None
        except (OSError, ProtocolError) as error:
            raise PeerLostError(f"{self.leader}, which leads, is gone: {error}") from None
        return None

    def fail(self, reason: str) -> None:
        """Tell the leader, if it is still there, that this host cannot join."""
        with contextlib.suppress(OSError):
            self._lines.link.settimeout(GREETING_SECONDS)
            self._lines.link.sendall(_line(failed=reason[:1024]))

    def close(self) -> None:
        """Close the connection."""
        self._lines.link.close()


def follow(leader: str, port: int, host: str, own: str, deadline: float) -> Follower:
    """Connect from this host's address on the job's interface to the leader as soon as it can be reached."""
    # DeadlineError, with the last reason: it could not be until the deadline, of `time.monotonic`.
    reason: object = "its name does not resolve"
    while (left := deadline - time.monotonic()) > 0:
        for address in sorted(addresses_of(leader)):
            try:
                return _ask(leader, (address, port), host, own, min(left, GREETING_SECONDS))
            except (OSError, ProtocolError) as error:
                reason = f"{address}:{port}: {error}"
        time.sleep(min(RETRY_SECONDS, left))
    raise DeadlineError(f"{host} could not reach {leader}, which leads, in time: {reason}")


def _ask(leader: str, at: tuple[str, int], host: str, own: str, seconds: float) -> Follower:
    link = socket.create_connection(at, seconds, source_address=(own, 0))
    try:
        lines = Lines(link)
        link.sendall(_line(host=host))
        messages = lines.arrived()
        return Follower(leader, lines, _welcome(messages[0] if messages else {}))
    except BaseException:
        link.close()
        raise


def _welcome(message: Mapping[str, Any]) -> Welcome:
    ray, token = message.get("ray"), message.get("token")
    if not isinstance(ray, str) or not isinstance(token, str):
        raise ProtocolError("what answers is not the leader of a job")
    return Welcome(ray, token)
