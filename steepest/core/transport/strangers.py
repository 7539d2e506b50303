"""Bounds for callers that have not proven the token: their number, their time, descriptors, lines of the log."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

log = logging.getLogger(__name__)

MOST_OPENINGS = 48  # connections of one listening process that have proven nothing
OPENING_SECONDS = 5.0  # within which each has to prove the token
LOG_SECONDS = 60.0
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ROOT = 0
_random = random.Random(secrets.randbits(64))  # the user's generators stay as they are
T = TypeVar("T")


class Refusals:
    """A count of refused connections, and their log: the first at once, then one line a minute.

    Args:
        clock: in seconds, monotonic.
        what: the end that was connected to, for the log, as " to ..."; empty for this process.
    """

    def __init__(self, clock: Callable[[], float], what: str = "") -> None:
        self.count = 0
        self._what = what
        self._clock = clock
        self._unlogged = 0
        self._last = ""
        self._next = -float("inf")

    def add(self, origin: str, reason: str) -> None:
        """Count a refused connection from an address or a user, and log it if a line is due."""
        self.count += 1
        self._unlogged += 1
        self._last = f"{origin}: {reason}"
        self.log_if_due()

    def log_if_due(self, *, now: bool = False) -> None:
        """Log the refusals that are not logged yet, if a line is due or `now`."""
        if self._unlogged and (now or self._clock() >= self._next):
            self._next = self._clock() + LOG_SECONDS
            number = (
                "a connection"
                if self._unlogged == 1
                else f"{self._unlogged} connections, the last of them"
            )
            log.warning("refused %s%s from %s", number, self._what, self._last)
            self._unlogged = 0


class DescriptorReserve:
    """A descriptor kept in reserve, with which a listener can accept and turn away a caller when none is left."""

    def __init__(self) -> None:
        self._kept = -1

    def fill(self) -> None:
        """Open the descriptor, if there is none and one is left."""
        if self._kept < 0:
            with contextlib.suppress(OSError):
                self._kept = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def free(self) -> None:
        """Close the descriptor, if there is one."""
        if self._kept >= 0:
            os.close(self._kept)
            self._kept = -1

    def spend(self, send_away: Callable[[], None]) -> bool:
        """Call a function with one descriptor to use, and ignore its OSError; return False if there is none."""
        self.fill()
        if self._kept < 0:
            return False
        self.free()
        with contextlib.suppress(OSError):
            send_away()
        self.fill()
        return True


def one_of_a_crowd(origins: Mapping[T, str]) -> T:
    """Return a random one of the connections from the origin that has most of them.

    Args:
        origins: of each connection, one or more, see `origin_of`.
    """
    crowds = Counter(origins.values())
    most = max(crowds.values())
    return _random.choice([each for each, origin in origins.items() if crowds[origin] == most])


def origin_of(sock: socket.socket, address: object) -> tuple[str, bool]:
    """Return a connection's origin, a user of the host or an address, and whether it is a foreign user of the host.

    IPv6 addresses of one network of 64 bits are one origin.
    """
    if sock.family == socket.AF_UNIX:
        uid = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )[1]
        return f"user {uid}", uid not in (os.geteuid(), _ROOT)
    assert isinstance(address, tuple)
    host = str(address[0]).partition("%")[0]
    if sock.family == socket.AF_INET6:
        network = socket.inet_pton(socket.AF_INET6, host)[:8] + bytes(8)
        host = f"{socket.inet_ntop(socket.AF_INET6, network)}/64"
    return host, False
