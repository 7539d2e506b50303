"""Opening a channel, whichever way a process is reached."""

from __future__ import annotations

from steepest.transport.channel import Address, Channel
from steepest.transport.ray_calls import Callee, CallTransport
from steepest.transport.sockets import WireTransport


def connect(
    transport: WireTransport | CallTransport, other: Address | Callee, timeout: float
) -> Channel:
    """Open a channel to another process of the job."""
    if isinstance(other, Callee):
        assert isinstance(transport, CallTransport)
        return transport.connect(other, timeout)
    assert isinstance(transport, WireTransport)
    return transport.connect(other, timeout)
