"""The optimizer's state, read by a worker in the middle of its model's work: its own, or the servers'."""

from __future__ import annotations

from collections.abc import Callable

from steepest.core.engine.client import Client
from steepest.core.engine.replicas import Replicas
from steepest.core.optim.portable import Record
from steepest.errors import PeerLostError


def read_state(
    client: Client, replicas: Replicas, wait: Callable[[Callable[[], bool]], None]
) -> list[Record]:
    """Return the state of the worker's own optimizer, or what servers hold of that of dense parameters, at one version.

    Called on the thread of the client's router.

    Args:
        client: reads from the servers.
        replicas: the worker's.
        wait: see `steepest.core.models.protocol.Model.meet`. What it raises is raised, and the answer is dropped.
    """
    if (own := replicas.own_records()) is not None:
        return own
    reading = client.read("state", chunks=list(replicas.layout.dense_chunks))

    def is_here() -> bool:
        # where a server is lost the change that follows ends the wait, and the state is read again
        return reading.done() and not isinstance(reading.exception(), PeerLostError)

    try:
        wait(is_here)
    except BaseException as error:
        if not reading.done():
            client.give_up(reading, PeerLostError(f"the read was given up: {error}"))
        raise
    return reading.result().records
