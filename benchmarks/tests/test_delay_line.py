"""Packets come late and at a limited rate: by a clock that is given, and by TCP through TUN devices."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import namespaces
from benchmarks.delay_line import QUEUE, DelayLine
from benchmarks.namespaces import Namespace, enter, star, unavailable

ADDRESSES = [socket.inet_aton(f"10.0.0.{i}") for i in range(3)]


class Hosts:
    """Three ends of a line, as sockets in place of TUN devices."""

    def __init__(self) -> None:
        self._pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in ADDRESSES]
        for end in (end for pair in self._pairs for end in pair):
            end.setblocking(False)
        self.devices = [device.fileno() for _, device in self._pairs]

    def send(self, source: int, to: bytes, size: int) -> None:
        """A host gives its device an IPv4 packet."""
        self._pairs[source][0].send((b"\x45" + bytes(15) + to).ljust(size, b"\0"))

    def received(self, host: int) -> int | None:
        """How long a packet is that has come, or None."""
        try:
            return len(self._pairs[host][0].recv(65536))
        except BlockingIOError:
            return None

    def close(self) -> None:
        """Close all sockets."""
        for end in (end for pair in self._pairs for end in pair):
            end.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    made.close()


def line_of(hosts: Hosts, rate: float, delay: float) -> DelayLine:
    return DelayLine(dict(zip(ADDRESSES, hosts.devices, strict=True)), rate, delay)


def arrivals(line: DelayLine, hosts: Hosts, host: int) -> list[tuple[float, int]]:
    """Let time pass, and return when packets came to a host, and how long they were."""
    found, now = [], 0.0
    while (due := line.deliver(now)) is not None:
        now = due
        line.deliver(now)
        while (size := hosts.received(host)) is not None:
            found.append((round(now, 6), size))
    return found


def test_a_packet_takes_both_links_and_the_delay(hosts: Hosts) -> None:
    line = line_of(hosts, 1000, 0.5)
    hosts.send(0, ADDRESSES[1], 100)
    line.take(hosts.devices[0], 0.0)
    assert arrivals(line, hosts, 1) == [(0.1 + 0.5 + 0.1, 100)]


def test_packets_follow_each_other_at_the_rate_of_a_link(hosts: Hosts) -> None:
    line = line_of(hosts, 1000, 0.5)
    for _ in range(3):
        hosts.send(0, ADDRESSES[1], 100)
    line.take(hosts.devices[0], 0.0)
    assert arrivals(line, hosts, 1) == [(0.7, 100), (0.8, 100), (0.9, 100)]


def test_two_senders_share_the_link_of_one_receiver(hosts: Hosts) -> None:
    line = line_of(hosts, 1000, 0.5)
    for source in (0, 1):
        hosts.send(source, ADDRESSES[2], 100)
        line.take(hosts.devices[source], 0.0)
    assert arrivals(line, hosts, 2) == [(0.7, 100), (0.8, 100)]


def test_directions_do_not_share_a_link(hosts: Hosts) -> None:
    line = line_of(hosts, 1000, 0.5)
    for source in (0, 1):
        hosts.send(source, ADDRESSES[1 - source], 100)
        line.take(hosts.devices[source], 0.0)
    assert arrivals(line, hosts, 0) == [(0.7, 100)]
    assert hosts.received(1) == 100


def test_without_a_rate_there_is_only_the_delay(hosts: Hosts) -> None:
    line = line_of(hosts, math.inf, 0.5)
    for _ in range(2):
        hosts.send(0, ADDRESSES[1], 100)
    line.take(hosts.devices[0], 0.0)
    assert arrivals(line, hosts, 1) == [(0.5, 100), (0.5, 100)]


def test_what_would_wait_too_long_is_dropped(hosts: Hosts) -> None:
    line = line_of(hosts, 100, 0.0)
    for _ in range(5):
        hosts.send(0, ADDRESSES[1], 100)  # a second each
    line.take(hosts.devices[0], 0.0)
    assert QUEUE == 1.0
    assert arrivals(line, hosts, 1) == [(2.0, 100), (3.0, 100)]


def test_packets_to_nobody_and_of_other_protocols_are_ignored(hosts: Hosts) -> None:
    line = line_of(hosts, 1000, 0.5)
    hosts.send(0, socket.inet_aton("10.0.0.9"), 100)
    hosts._pairs[0][0].send(b"\x60" + bytes(39))  # of IPv6, as a device sends when it is set up
    line.take(hosts.devices[0], 0.0)
    assert line.deliver(10.0) is None


def _listen(space: Namespace) -> socket.socket:
    """Listen in a namespace, which this thread stays in."""
    enter(space.name)
    return socket.create_server((space.address, 0))


def _answer(listener: socket.socket, size: int) -> None:
    """Answer a byte, then `size` more together."""
    with listener, listener.accept()[0] as connection:
        connection.sendall(connection.recv(1))
        while size:
            size -= len(connection.recv(min(size, 1 << 20)))
        connection.sendall(b"x")


def _ask(space: Namespace, address: tuple[str, int], size: int) -> tuple[float, float]:
    """Return the seconds of a round trip, and those until `size` bytes are known to be there."""
    enter(space.name)
    with socket.create_connection(address) as connection:
        begin = time.monotonic()
        connection.sendall(b"x")
        connection.recv(1)
        sent = time.monotonic()
        connection.sendall(bytes(size))
        connection.recv(1)
        return sent - begin, time.monotonic() - sent


def test_round_trip_and_rate_between_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    if not Path("/dev/net/tun").exists():
        pytest.skip("the kernel has no TUN devices")
    monkeypatch.setattr(namespaces, "_limit", lambda *_: None)  # as where there is no netem
    size = 500_000
    with (
        star(2, 20, 100.0) as spaces,
        ThreadPoolExecutor(1) as there,
        ThreadPoolExecutor(1) as here,
    ):
        listener = there.submit(_listen, spaces[0]).result()
        answered = there.submit(_answer, listener, size)
        asked = here.submit(_ask, spaces[1], listener.getsockname(), size)
        round_trip, took = asked.result()
        answered.result()
    assert round_trip >= 0.1
    assert took >= 0.1 + size / 2.5e6
