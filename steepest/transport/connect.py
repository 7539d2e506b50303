"""The opening of a channel, by a socket or by actor calls."""

from __future__ import annotations

from steepest.transport.channel import Address, Channel
from steepest.transport.ray_calls import Callee, CallTransport
from steepest.transport.sockets import WireTransport


def connect(
    transport: WireTransport | CallTransport, other: Address | Callee, timeout: float
) -> Channel:
    """Open a channel to another process of the job, and return it.

    Args:
        transport: of this process.
        other: the address of the process, or the actor that it is; goes with the transport.
        timeout: in seconds.

    Raises:
        SteepestError: see `WireTransport.connect` and `CallTransport.connect`.
    """
    if isinstance(other, Callee):
        assert isinstance(transport, CallTransport)
        return transport.connect(other, timeout)
    assert isinstance(transport, WireTransport)
    return transport.connect(other, timeout)
