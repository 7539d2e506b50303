"""The hosts of a job find each other: a TCP connection of each to the leader, for as long as it runs.

By it a host gets Ray's address and token, says whether it has joined, and hears how the job has ended.
The leader speaks to the job's hosts alone: to addresses to which their names resolve. Messages are
lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from steepest.errors import ConfigurationError, DeadlineError, PeerLostError

log = logging.getLogger(__name__)
LONGEST_LINE = 8192  # bytes
ALIVE = {"KEEPIDLE": 30, "KEEPINTVL": 10, "KEEPCNT": 3}  # a minute of silence ends a connection
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
        records = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(each[4][0]) for each in records}


def keep_alive(link: socket.socket) -> None:
    """Let the kernel end a connection whose other end is silent for a minute."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ALIVE.items():
        link.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)


def say(link: socket.socket, **message: Any) -> None:
    """Send a message; if the connection has ended, do nothing, as the reader notices that."""
    with contextlib.suppress(OSError):
        link.sendall(json.dumps(message).encode() + b"\n")


class Lines:
    """The messages that come by a connection."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._file = link.makefile("rb")

    def next(self) -> dict[str, Any]:
        """Wait for a message; OSError, ValueError: the connection has ended, or this is none."""
        line = self._file.readline(LONGEST_LINE)
        if not line:
            raise ConnectionError("the connection is closed")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("a line that is no JSON object")
        return message

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self.link.close()


class Leader:
    """The leader's end: a thread accepts hosts, and one for each says the welcome and hears the host."""

    # address: its own on the job's interface; hosts: names of the others; welcome: variables that a host is given;
    # resolve: returns a name's addresses.

    def __init__(
        self,
        address: str,
        port: int,
        hosts: tuple[str, ...],
        welcome: dict[str, str],
        resolve: Callable[[str], set[str]] = addresses_of,
    ) -> None:
        self._hosts, self._welcome, self._resolve = hosts, welcome, resolve
        self._addresses: dict[str, set[str]] = {}
        self._asked: dict[str, socket.socket] = {}
        self._joined: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._ended = False
        self.failed: dict[str, str] = {}
        try:
            self._listener = socket.create_server((address, port), backlog=len(hosts) + 8)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen at {address}:{port}, where the other hosts ask: {error}; give "
                "another --port"
            ) from None
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def _start(self, what: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=what, args=arguments, daemon=True))
        self._threads[-1].start()

    def silent(self) -> list[str]:
        """Return the hosts that are not connected."""
        return [host for host in self._hosts if host not in self._asked]

    def missing(self) -> list[str]:
        """Return the hosts that have not joined."""
        return [host for host in self._hosts if host not in self._joined]

    def end(self, status: int, reason: str) -> None:
        """Tell all hosts the exit status and the failure's reason, or "", and wait until they have read it."""
        self._ended = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes its thread
        for link in list(self._asked.values()):
            say(link, ended=status, reason=reason[:1024])
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + PARTING_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._listener.close()

    def _accept(self) -> None:
        refused = set()
        while not self._ended:
            try:
                link, (address, _) = self._listener.accept()
            except OSError:
                continue
            host = next((each for each in self._hosts if self._has(each, address)), None)
            if host is not None:
                self._start(self._serve, host, Lines(link))
                continue
            link.close()
            if address not in refused:
                refused.add(address)
                log.warning("%s is refused: no host of the job has that address (yet)", address)

    def _has(self, host: str, address: str) -> bool:
        """Return whether an address is a host's; its name is looked up until it resolves."""
        if not self._addresses.get(host):
            self._addresses[host] = self._resolve(host)
        return address in self._addresses[host]

    def _serve(self, host: str, lines: Lines) -> None:
        """Send a host the welcome, and read its messages until its connection ends."""
        keep_alive(lines.link)
        self._asked[host] = lines.link
        say(lines.link, **self._welcome)
        try:
            while True:
                message = lines.next()
                if "failed" in message:
                    self.failed[host] = str(message["failed"])[:1024]
                else:
                    log.info("%s has joined", host)
                    self._joined.add(host)
        except (OSError, ValueError) as error:
            if self._asked.get(host) is lines.link:
                del self._asked[host]
                self._joined.discard(host)
                if not self._ended:
                    log.warning("%s is gone: %s", host, error)
        finally:
            lines.close()


class Follower:
    """Another host's end of the leader's connection; `welcome` are the variables that it has said."""

    def __init__(self, leader: str, link: socket.socket) -> None:
        self.leader, self._link = leader, link
        self._lines = Lines(link)
        self.welcome = {name: str(value) for name, value in self._lines.next().items()}
        if "RAY_ADDRESS" not in self.welcome:
            raise ValueError("what answers is not the leader of a job")
        link.settimeout(None)
        keep_alive(link)

    def joined(self) -> None:
        """Tell the leader that this host is a node of Ray."""
        say(self._link, joined=True)

    def fail(self, reason: str) -> None:
        """Tell the leader that this host cannot join."""
        say(self._link, failed=reason[:1024])

    def poll(self, seconds: float) -> tuple[int, str] | None:
        """Wait `seconds` for a message of the leader; return its exit status and reason if it has ended.

        After its last message the leader closes the connection, so that there is something to read even if the
        message has been read ahead.

        Raises:
            PeerLostError: the connection ended without a last message, or has been silent for a minute.
        """
        if not select.select([self._link], [], [], seconds)[0]:
            return None
        try:
            message = self._lines.next()
            return int(message["ended"]), str(message["reason"])
        except (OSError, ValueError, KeyError) as error:
            raise PeerLostError(f"{self.leader}, which leads, is gone: {error}") from None

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()


def follow(leader: str, port: int, own: str, deadline: float) -> Follower:
    """Connect from this host's address on the job's interface to the leader as soon as it can be reached.

    Raises:
        DeadlineError: it could not be reached until the deadline, of `time.monotonic`; with the last reason.
    """
    reason: object = "its name does not resolve"
    while (left := deadline - time.monotonic()) > 0:
        for address in sorted(addresses_of(leader)):
            seconds = min(left, GREETING_SECONDS)
            link = None
            try:
                link = socket.create_connection((address, port), seconds, source_address=(own, 0))
                return Follower(leader, link)
            except (OSError, ValueError) as error:
                reason = f"{address}:{port}: {error}"
                if link is not None:
                    link.close()
        time.sleep(min(RETRY_SECONDS, left))
    raise DeadlineError(f"could not reach {leader}, which leads, in time: {reason}")
