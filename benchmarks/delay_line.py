"""A process that carries packets between TUN devices, late and at a limited rate, where the kernel has no netem.

    python benchmarks/delay_line.py MBIT MILLISECONDS FD:ADDRESS FD:ADDRESS ...

Each FD is an open TUN device, which it was given, and ADDRESS the IPv4 address behind it. Each device has a link of
MBIT Mbit/s (0: no limit) to a hub and one back; a packet takes MILLISECONDS from a device to another beside the time on
both links. A packet that would wait for longer than `QUEUE` seconds before a link is dropped, as a full router does.
It ends when its standard input does. `benchmarks.namespaces.star` starts it; it needs nothing but Python's library.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import socket
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MTU = 9000  # at 100 Mbit/s 1,400 packets a second for each link
LARGEST = 65536
QUEUE = 1.0
READ_AT_ONCE = 64  # packets of a device, before others have their turn
NICENESS = -10  # links are not to be slower on a machine that is busy


def open_tun(name: str) -> int:
    """Make a TUN device in this thread's network namespace, and return what its packets are read from.

    Raises:
        OSError: the kernel has none, or not for this user.
    """
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI)
        fcntl.ioctl(tun, TUNSETIFF, request)
    except OSError:
        os.close(tun)
        raise
    return tun


class DelayLine:
    """Links from devices to a hub and back.

    Args:
        devices: what packets of each address are read from and written to.
        rate: bytes a second of each link and direction, or infinity.
        delay: seconds from device to device.
    """

    def __init__(self, devices: dict[bytes, int], rate: float, delay: float) -> None:
        self._devices, self._rate, self._delay = devices, rate, delay
        self._free = [dict.fromkeys(devices.values(), 0.0) for _ in range(2)]
        self._under_way: list[tuple[float, int, bool, int, bytes]] = []
        self._count = 0

    def take(self, device: int, now: float) -> None:
        """Read what has come from a device; it is on its link from now on."""
        for _ in range(READ_AT_ONCE):
            try:
                packet = os.read(device, LARGEST)
            except BlockingIOError:
                return
            if packet[0] >> 4 == 4 and (to := self._devices.get(packet[16:20])) is not None:
                over = self._link(0, device, now, len(packet))
                if over is not None:
                    self._push(over + self._delay, True, to, packet)

    def deliver(self, now: float) -> float | None:
        """Write what is due to its device, and return when more is due."""
        while self._under_way and self._under_way[0][0] <= now:
            due, _, at_hub, to, packet = heapq.heappop(self._under_way)
            if at_hub:
                over = self._link(1, to, due, len(packet))
                if over is not None:
                    self._push(over, False, to, packet)
            else:
                with contextlib.suppress(OSError):  # the namespace is gone, or its device is down
                    os.write(to, packet)
        return self._under_way[0][0] if self._under_way else None

    def _link(self, direction: int, device: int, now: float, size: int) -> float | None:
        """Return when a packet is over a link, or None if it is dropped."""
        free = self._free[direction]
        begin = max(now, free[device])
        if begin - now > QUEUE:
            return None
        free[device] = begin + size / self._rate
        return free[device]

    def _push(self, due: float, at_hub: bool, to: int, packet: bytes) -> None:
        self._count += 1
        heapq.heappush(self._under_way, (due, self._count, at_hub, to, packet))


def main(arguments: list[str]) -> None:
    """Carry packets until standard input ends."""
    mbit, milliseconds, *given = arguments
    devices = {}
    for each in given:
        number, _, address = each.partition(":")
        devices[socket.inet_aton(address)] = int(number)
    with contextlib.suppress(PermissionError):
        os.nice(NICENESS)
    line = DelayLine(devices, float(mbit) * 1e6 / 8 or float("inf"), float(milliseconds) / 1000)
    watched = [sys.stdin.fileno(), *devices.values()]
    due: float | None = None
    while True:
        wait = None if due is None else max(due - time.monotonic(), 0.0)
        ready, _, _ = select.select(watched, [], [], wait)
        if watched[0] in ready:
            return
        now = time.monotonic()
        for device in ready:
            line.take(device, now)
        due = line.deliver(now)


if __name__ == "__main__":
    main(sys.argv[1:])
