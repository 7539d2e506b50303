"""The optimizer's state, read from the servers by a worker in the middle of its model's work."""

from __future__ import annotations

from collections.abc import Callable

from steepest.core.engine.client import Client
from steepest.core.optim.portable import Record
from steepest.core.tensors.layout import ParameterLayout
from steepest.errors import PeerLostError


def read_state(
    client: Client, layout: ParameterLayout, wait: Callable[[Callable[[], bool]], None]
) -> list[Record]:
    """Return what servers hold of the optimizer's state of dense parameters, at one version.

    Called on the thread of the client's router.

    Args:
        client: reads.
        layout: of the job's parameters.
        wait: see `steepest.core.models.protocol.Model.meet`. What it raises is raised, and the answer is dropped.
    """
    reading = client.read("state", chunks=list(layout.dense_chunks))

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
