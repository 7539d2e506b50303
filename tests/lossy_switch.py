"""A network switch whose links are slow and lose frames: ``python lossy_switch.py MILLISECONDS PERCENT PORT...``.

Frames are taken from each port and leave by another, or by all others, after a delay, unless they
are lost. They carry the kernel's own description of what is still to be done to them (checksums,
segments), so that ends that leave this to their devices understand each other. Ends when its input
ends, with a line that says how many came and were lost.
"""

from __future__ import annotations

import collections
import random
import select
import socket
import sys
import time

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_VNET_HDR = 15
DESCRIPTION = 10  # bytes of struct virtio_net_hdr in front of each frame
LARGEST = DESCRIPTION + 14 + (1 << 16)
SO_RCVBUFFORCE = 33


def port(name: str) -> socket.socket:
    """All frames that come by a device."""
    raw = socket.socket(
        socket.AF_PACKET, socket.SOCK_RAW, 0
    )  # takes nothing before it knows which device
    raw.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    raw.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)
    raw.setblocking(False)
    raw.bind((name, ETH_P_ALL))
    return raw


def forward(delay: float, loss: float, ports: list[socket.socket]) -> tuple[int, int]:
    """Until the input ends; returns how many frames came, and how many of them were lost."""
    chance = random.Random(0)
    homes: dict[bytes, socket.socket] = {}  # by address
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    came = lost = 0
    while True:
        pause = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        ready, _, _ = select.select([sys.stdin, *ports], [], [], pause)
        while waiting and waiting[0][0] <= time.monotonic():
            _, out, frame = waiting.popleft()
            try:
                out.send(frame)
            except OSError:  # that end's link is down, or its queue is full
                lost += 1
        if sys.stdin in ready:
            return came, lost
        for source in ready:
            frame, (_, _, kind, *_) = source.recvfrom(LARGEST)
            if kind == socket.PACKET_OUTGOING:  # said by this host itself
                continue
            came += 1
            to, of = frame[DESCRIPTION : DESCRIPTION + 6], frame[DESCRIPTION + 6 : DESCRIPTION + 12]
            homes[of] = source
            if chance.random() < loss:
                lost += 1
                continue
            outs = [homes[to]] if to in homes else ports
            waiting.extend(
                (time.monotonic() + delay, out, frame) for out in outs if out is not source
            )


if __name__ == "__main__":
    milliseconds, percent, *names = sys.argv[1:]
    opened = [port(name) for name in names]
    sys.stdout.write("forwarding\n")
    sys.stdout.flush()
    came, lost = forward(float(milliseconds) / 1e3, float(percent) / 100, opened)
    sys.stdout.write(f"{came} came, {lost} lost\n")
